#!/usr/bin/env bash
# Train SmolLM2 with FSPO, and evaluate it before and after:
#
#     examples/smollm2/run.sh [seed] [--key value ...]
#
# Responses come from vLLM where $VLLM_BIN names one, else from the training model itself.
set -euo pipefail
cd "$(dirname "$0")/../.."
seed=${1:-1}
shift $(($# > 0))
config=examples/smollm2/run.toml model=runs/smollm2/checkpoint
folder=runs/smollm2-$seed before=runs/smollm2/before after=runs/smollm2/after-$seed
rm -rf "$folder" "$folder.server" "$after"

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
    megatron-fspo evaluate --config $config --nproc 2 "${engine[@]}" "$@"
}

evaluate --model $model --out $before "$@"
megatron-fspo train --config $config --nproc 2 --run.name "smollm2-$seed" --run.seed "$seed" "${engine[@]}" "$@"
evaluate --model "$folder/hf" --out "$after" --compare $before "$@"
