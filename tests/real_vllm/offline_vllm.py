"""Run by vLLM's Python: a model of each family, and an update of its weights from a disk.

offline_vllm.py OUT PROMPT NAME=OLD:NEW...

Writes log-probs and checksums before and after. Each family has a fork of a process that has imported vLLM,
which takes longer than all else.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

import vllm.entrypoints.llm as entry
from vllm import SamplingParams
from vllm.config import WeightTransferConfig

from megatron_fspo.rollout.server.flags import EXTENSION


def serve(old: str, new: str, prompt: list[int]) -> list[Any]:
    """Log-probs of the prompt's tokens but the first, and checksums: with the old weights, then the new."""
    llm = entry.LLM(
        model=old,
        dtype="float32",
        enforce_eager=True,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        attention_backend="CPU_MLA",  # of latent attention; the one that a CPU with AMX takes has no float32
        max_model_len=128,
        max_num_seqs=4,
        logprobs_mode="processed_logprobs",
        worker_extension_cls=EXTENSION,
        weight_transfer_config=WeightTransferConfig(backend="disk"),
    )
    params = SamplingParams(max_tokens=2, temperature=1.0, prompt_logprobs=0)

    def state() -> list[Any]:
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        pairs = zip(answer.prompt_logprobs[1:], prompt[1:], strict=True)
        return [[row[token].logprob for row, token in pairs], llm.collective_rpc("weight_checksums")]

    before = state()
    llm.collective_rpc("init_weight_transfer_engine", args=({},))
    llm.collective_rpc("start_weight_update")
    llm.collective_rpc("update_weights", args=({"paths": [f"{new}/model.safetensors"]},))
    llm.collective_rpc("finish_weight_update")
    return [before, state()]


out, prompt = Path(sys.argv[1]), json.loads(sys.argv[2])
for words in sys.argv[3:]:
    name, _, folders = words.partition("=")
    if (child := os.fork()) == 0:
        found = serve(*folders.split(":"), prompt)
        (out / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")
        os._exit(0)  # vLLM's threads and groups end with the process
    os.waitpid(child, 0)
