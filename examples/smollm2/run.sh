#!/usr/bin/env bash
# Train SmolLM2 with one loss, and evaluate it before and after:
#
#     examples/smollm2/run.sh fspo [seed] [--key value ...]
#
# Responses come from vLLM where $VLLM_BIN names one, else from the training model itself.
set -euo pipefail
cd "$(dirname "$0")/../.."
loss=${1:-fspo} seed=${2:-1}
shift $(($# < 2 ? $# : 2))
config=examples/smollm2/$loss.toml model=runs/smollm2/checkpoint
folder=runs/smollm2-$loss-$seed before=runs/smollm2/before
rm -rf "$folder" "$folder.server" "runs/smollm2/after-$loss-$seed"

engine=()
if [ -n "${VLLM_BIN:-}" ]; then
    port=${PORT:-8100}
    engine=(--rollout.engine vllm --vllm.urls "[\"http://127.0.0.1:$port\"]")
    megatron-fspo serve --model $model --port "$port" --dtype float32 > "$folder.server" &
    server=$!
    trap 'kill $server 2>/dev/null; wait $server' EXIT
    echo "waiting for vLLM, about a minute"
    until grep -s "is ready" "$folder.server"; do
        kill -0 $server 2>/dev/null || exit 1
        sleep 1
    done
fi

evaluate() {
    megatron-fspo evaluate --config "$config" --nproc 2 "${engine[@]}" "$@"
}

evaluate --model $model --out $before "${@}"
megatron-fspo train --config "$config" --nproc 2 --run.name "smollm2-$loss-$seed" --run.seed "$seed" "${engine[@]}" "$@"
evaluate --model "$folder/hf" --out "runs/smollm2/after-$loss-$seed" --compare $before "${@}"
