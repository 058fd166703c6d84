#!/usr/bin/env bash
# The tasks of job.sbatch, one per node:
#
#   task.sh train WORD...    the ranks of a node; exit status 143 if SIGTERM ended them
#   task.sh servers          the vLLM servers of a node
#   task.sh ready URLS       whether all of them answer
set -u
case $1 in
train)
  shift
  stopped=
  # Slurm signals the whole process group, torchrun in it, so nothing is passed on.
  trap 'stopped=1' TERM
  export NODE_RANK=$SLURM_NODEID
  bash "${SCRIPT:-examples/run_fspo_qwen3_8b.sh}" "$@" &
  ranks=$!
  wait "$ranks"
  status=$?
  while kill -0 "$ranks" 2> /dev/null; do
    wait "$ranks"
    status=$?
  done
  if [ "$status" != 0 ] && [ -n "$stopped" ]; then exit 143; fi
  exit "$status"
  ;;
servers)
  # A signal to the job is for the trainer, which may be in need of the servers until it has ended.
  trap '' TERM
  for (( i = 0; i < SERVERS; i++ )); do
    # shellcheck disable=SC2086  # words
    CUDA_VISIBLE_DEVICES=$(( FIRST_GPU + i )) setsid "$PYTHON" -m megatron_fspo serve --model "$MODEL" \
      --host "$SLURMD_NODENAME" --port "$(( 8000 + i ))" \
      --log "runs/vllm-$SLURMD_NODENAME-$(( 8000 + i )).log" ${SERVE---backend nccl} &
  done
  wait -n  # serve starts a vLLM that crashed anew, so one that ends cannot go on
  ;;
ready)
  "$PYTHON" - "$2" << 'END'
import sys
import urllib.request

for url in sys.argv[1].replace("'", "").rstrip(",").split(","):
    try:
        urllib.request.urlopen(f"{url}/health", timeout=5).close()
    except OSError:
        sys.exit(1)
END
  ;;
esac
