# `make help` lists the targets. Everything is installed into .venv (and .venv312 for test-py312).

# The first interpreter of at least Python $(1) among $(2).
find_python = $(firstword $(foreach p,$(2),$(shell $(p) -c 'import sys; sys.version_info >= ($(1)) and print("$(p)")' 2>/dev/null)))

PYENV := $(sort $(wildcard $(HOME)/.pyenv/versions/3.1*/bin/python3))
PYTHON ?= $(call find_python,3$(,)11,python3.11 python3 python3.12 python3.13 $(PYENV))
PYTHON312 ?= $(call find_python,3$(,)12,python3.12 python3.13 python3 $(PYENV))
, := ,

VENV := .venv
VENV312 := .venv312
REQUIREMENTS := requirements.txt pyproject.toml
DEMO_ARGS ?=
PYTEST_ARGS ?=

export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test test-py312 verify lint format bench docs clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.ready  ## train the tiny model with FSPO on 2 CPU processes; DEMO_ARGS="--run.steps 4" shortens it
	rm -rf runs/demo
	$(VENV)/bin/megatron-fspo train --config examples/make_sum/run.toml --nproc 2 $(DEMO_ARGS)
	$(VENV)/bin/python examples/make_sum/check_export.py runs/demo

test: $(VENV)/.ready  ## run the whole suite; PYTEST_ARGS selects
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

test-py312: $(VENV312)/.ready  ## the same suite on Python 3.12 with megatron-core 0.19
	$(VENV312)/bin/python -m pytest $(PYTEST_ARGS)

verify: $(VENV)/.ready  ## the gradient of every parallel layout on 8 CPU processes against one in float64
	$(VENV)/bin/megatron-fspo verify --nproc 8 --all

lint: $(VENV)/.ready  ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/.ready  ## reformat
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(VENV)/.ready  ## length fairness of FSPO, RLOO and GSPO; memory and time of the log-prob head
	$(VENV)/bin/python benchmarks/fairness.py
	$(VENV)/bin/python benchmarks/logprob_head.py

docs: $(VENV)/.ready  ## rewrite what docs/ has from the code
	$(VENV)/bin/python docs/make_config.py
	$(VENV)/bin/python docs/make_parallelism.py
	$(VENV)/bin/python docs/make_faults.py

clean:  ## remove environments, runs and caches
	rm -rf .venv .venv312 runs *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.ready: $(REQUIREMENTS)
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; name one: make PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/pip install --quiet --requirement requirements.txt
	touch $@

$(VENV312)/.ready: $(REQUIREMENTS)
	@test -n "$(PYTHON312)" || { echo "no Python 3.12 or newer found; name one: make PYTHON312=/path/to/python3.12 test-py312"; exit 2; }
	$(PYTHON312) -m venv --clear $(VENV312)
	$(VENV312)/bin/pip install --quiet --requirement requirements.txt
	touch $@
