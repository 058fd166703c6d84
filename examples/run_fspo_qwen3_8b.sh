#!/usr/bin/env bash
""":"
# FSPO on Qwen3-8B. A shell script and a Python program in one file, so both of these start the same job:
#
#   bash examples/run_fspo_qwen3_8b.sh [--smoke] [--config FILE ...] [--section.key value ...]
#   torchrun --nproc-per-node 8 examples/run_fspo_qwen3_8b.sh [--smoke] ...
#
# The configuration is examples/qwen3_8b/run.toml; FILE changes it: another loss, a layout, FP8.
# --smoke runs the same configuration small, on two CPU processes: the tiny make-sum model for the 8B one.
# After SIGTERM a run finishes what it has begun and saves. The shell form gives it half an hour for that, or
# TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds. With torchrun itself it is torchrun's 30 s, and then a kill: add
# --shutdown-timeout 1800 before the file's name, since nothing in the file can.
#
# The shell form reads from the environment:
#   NPROC           processes per node (8; with --smoke 2)
#   PYTHON          the interpreter (python3)
#   NNODES          nodes (1), or MIN:MAX: after a failure the job goes on with what is left
#   NODE_RANK       which of the nodes this is, from 0; the same line runs on every node
#   MASTER_ADDR, MASTER_PORT   node 0 as the others see it, and a free port there (29500)
#   MAX_RESTARTS    how often torchrun starts all ranks anew after one has failed (0)
#   RENDEZVOUS_SECONDS   how long node 0 may be gone while nodes meet (60)
#   NUMA            binds each rank to the cores near its GPU: node, exclusive, ... (torchrun --numa-binding)
#   VERB            train, or verify: the gradient of this layout; torchrun itself obeys it, too
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3} nnodes=${NNODES:-1} node=${NODE_RANK:-0} restarts=${MAX_RESTARTS:-0}
nproc=${NPROC:-8}
for word in "$@"; do
  if [ "$word" = --smoke ]; then nproc=${NPROC:-2}; fi
done
export PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

if [ "$nnodes" = 1 ]; then
  meet="--rdzv-endpoint 127.0.0.1:0"
else
  : "${NODE_RANK:?NNODES needs NODE_RANK, the number of this node}" "${MASTER_ADDR:?NNODES needs MASTER_ADDR}"
  host=$([ "$node" = 0 ] && echo true || echo false)
  meet="--nnodes $nnodes --rdzv-endpoint $MASTER_ADDR:${MASTER_PORT:-29500}
    --rdzv-conf is_host=$host"
fi
if [ "$restarts" != 0 ] || [ "$nnodes" != "${nnodes#*:}" ]; then
  case " $* " in
    *" --resume auto "*) ;;
    *) echo "MAX_RESTARTS and NNODES=MIN:MAX need --resume auto: ranks that are started anew go on" >&2; exit 2 ;;
  esac
fi
# Check the arguments once, here, where every error is one line, and exit status 2. Later nodes may come when
# the first has begun to write.
if [ "$node" = 0 ] && [ "${VERB:-train}" != verify ]; then
  WORLD_SIZE=$((nproc * ${nnodes#*:})) "$python" "$0" --check "$@"
fi
# An agent that has reached node 0 waits without limit for its answer, if that vanishes while nodes meet. Once
# ranks are there, they watch each other.
watch_node_0() {
  last=''
  while sleep 2 && read -r _ _ _ parent _ < "/proc/$BASHPID/stat" && [ "$parent" = $$ ]; do
    children=$(cat "/proc/$$/task/$$/children") || return 0
    if [ "${children% }" != "$BASHPID" ] || timeout 5 bash -c "exec 3<> /dev/tcp/$1/$2" 2> /dev/null; then
      last=$SECONDS
    elif [ -n "$last" ] && [ $((SECONDS - last)) -ge "${RENDEZVOUS_SECONDS:-60}" ]; then
      echo "megatron-fspo: node $node: node 0 at $1:$2 has not answered for $((SECONDS - last)) s" >&2
      kill -KILL $$
    fi
  done
}
if [ "$node" != 0 ]; then watch_node_0 "$MASTER_ADDR" "${MASTER_PORT:-29500}" & fi
# shellcheck disable=SC2086  # words
exec "$python" -m megatron_fspo.cli.launch $meet --nproc-per-node "$nproc" --max-restarts "$restarts" \
  --shutdown-timeout "${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-1800}" ${NUMA:+--numa-binding "$NUMA"} "$0" "$@"
":"""

import os
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
EXAMPLES = REPO / "examples"
sys.path.insert(0, str(REPO))

# What --smoke changes in examples/qwen3_8b/run.toml: sizes, paths and the device, nothing of the method.
SMOKE = {
    "run.name": "smoke",
    "run.folder": "runs",
    "run.steps": "2",
    "model.checkpoint": str(EXAMPLES / "make_sum/checkpoint"),
    "model.dtype": "float32",
    "model.backend": "cpu",
    "fp8.recipe": "none",
    "parallel.tensor": "2",
    "parallel.sequence": "true",
    "data.train": str(EXAMPLES / "make_sum/train.jsonl"),
    "data.validation": str(EXAMPLES / "make_sum/validation.jsonl"),
    "data.template": "plain",
    "data.max_prompt_tokens": "4",
    "reward.name": "make_sum",
    "rollout.engine": "embedded",
    "rollout.prompts": "16",
    "rollout.max_response_tokens": "100",
    "optimizer.lr": "1e-4",
    "log.wandb": "off",
}


def arguments(words: list[str]) -> list[str]:
    """The command line of ``megatron-fspo``; what the user gave comes last and wins."""
    small = [part for key, value in SMOKE.items() for part in (f"--{key}", value)] if "--smoke" in words else []
    rest = [word for word in words if word != "--smoke"]
    verb = "verify" if os.environ.get("VERB") == "verify" else "train"
    return [verb, "--config", str(EXAMPLES / "qwen3_8b/run.toml"), *small, *rest]


if __name__ == "__main__":
    from megatron_fspo.cli import main

    sys.exit(main(arguments(sys.argv[1:])))
