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
  words='--backend nccl'
  if [ -n "$COLOCATED" ]; then words='--backend gloo'; fi  # NCCL takes a GPU for one process
  for (( i = 0; i < SERVERS; i++ )); do
    gpu=$(( FIRST_GPU + i * SERVER_GPUS ))
    # shellcheck disable=SC2086  # words
    setsid "$PYTHON" -m megatron_fspo serve --model "$MODEL" --host "$SLURMD_NODENAME" --port "$(( 8000 + i ))" \
      --gpus "$gpu-$(( gpu + SERVER_GPUS - 1 ))" --gpus-per-server "$SERVER_GPUS" ${COLOCATED:+--colocated} \
      --log "runs/vllm-$SLURMD_NODENAME-$(( 8000 + i )).log" ${SERVE-$words} &
  done
  wait -n  # serve starts a vLLM that crashed anew, so one that ends cannot go on
  ;;
ready)
  # Outside of the container, perhaps without Python.
  for url in ${2//[\',]/ }; do
    address=${url#http://}
    answer=$(timeout 5 bash -c "exec 3<> /dev/tcp/${address/://} && printf 'GET /health HTTP/1.0\r\n\r\n' >&3 &&
      head -1 <&3" 2> /dev/null)
    case $answer in *' 200 '*) ;; *) exit 1 ;; esac
  done
  ;;
esac
