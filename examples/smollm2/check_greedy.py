"""Check that transformers and vLLM agree with our engine on greedy answers of an exported checkpoint.

    megatron-fspo serve --model runs/smollm2-1/hf --port 8100 --dtype float32 &
    python examples/smollm2/check_greedy.py runs/smollm2-1 --vllm http://127.0.0.1:8100

Answers the held-out questions in float32. Only tokens before the first difference of two answers count as
agreement, since later ones have another context. Exit status 1 if less than 99% of the tokens agree.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM

from megatron_fspo.config.loading import load_config
from megatron_fspo.mcore.machine.startup import join, start, stop
from megatron_fspo.trainer.build import build_engine, load_model
from megatron_fspo.trainer.prepare import Inputs, prepare
from megatron_fspo.types import Prompt, SamplingParams

NEEDED = 0.99
Answers = list[list[int]]


def of_ours(inputs: Inputs, prompts: Sequence[Prompt]) -> Answers:
    """Return the answers of the embedded engine, as in training."""
    parallel = inputs.config.parallel
    join(inputs.backend, parallel=parallel)
    try:
        model = load_model(inputs, start(inputs.backend, parallel=parallel, seed=1))
        longest = inputs.config.rollout.max_response_tokens
        params = SamplingParams(
            n=1, max_tokens=longest, temperature=0.0, seed=1, stop_token_ids=inputs.stop_token_ids
        )
        found = build_engine(inputs, model, None).submit(prompts, params)()
    finally:
        stop()
    return [list(row[0].token_ids) for row in found]


@torch.no_grad()
def of_transformers(folder: Path, inputs: Inputs, prompts: Sequence[Prompt]) -> Answers:
    """Return the answers of transformers, prompt by prompt, so without padding."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt.token_ids])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=inputs.config.rollout.max_response_tokens,
            eos_token_id=list(inputs.stop_token_ids),
            pad_token_id=inputs.stop_token_ids[0],
        )
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers


def of_vllm(url: str, inputs: Inputs, prompts: Sequence[Prompt]) -> Answers:
    """Return the answers of a vLLM server, which loaded the exported checkpoint itself."""
    key = os.environ.get("VLLM_API_KEY", "none")
    with httpx.Client(base_url=url, timeout=300, headers={"Authorization": f"Bearer {key}"}) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        answers = []
        for prompt in prompts:
            request: dict[str, Any] = {
                "model": model,
                "prompt": list(prompt.token_ids),
                "temperature": 0,
                "max_tokens": inputs.config.rollout.max_response_tokens,
                "stop_token_ids": list(inputs.stop_token_ids),
                "return_token_ids": True,
            }
            answer = client.post("/v1/completions", json=request).raise_for_status().json()
            answers.append(answer["choices"][0]["token_ids"])
    return answers


def agreement(ours: Answers, theirs: Answers) -> tuple[float, int]:
    """Return the share of our tokens before the first difference, and the number of equal answers."""
    same = 0
    for mine, other in zip(ours, theirs, strict=True):
        differ = [a != b for a, b in zip(mine, other, strict=False)]
        same += differ.index(True) if any(differ) else min(len(mine), len(other))
    whole = sum(mine == other for mine, other in zip(ours, theirs, strict=True))
    return same / sum(map(len, ours)), whole


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--vllm", metavar="URL", help="vLLM server of the run's hf/")
    args = parser.parse_args()
    folder = args.run / "hf"
    overrides = ["--model.checkpoint", str(folder), "--rollout.engine", "embedded"]
    inputs = prepare(load_config(args.run / "config.toml", overrides), world_size=1, trains=False)
    inputs.backend.install()
    prompts = inputs.validation
    ours = of_ours(inputs, prompts)
    others = {"transformers": of_transformers(folder, inputs, prompts)}
    if args.vllm:
        others["vLLM"] = of_vllm(args.vllm, inputs, prompts)
    worst = 1.0
    for name, answers in others.items():
        share, whole = agreement(ours, answers)
        worst = min(worst, share)
        print(f"{name}: {100 * share:.2f}% of {sum(map(len, ours))} tokens before the first difference, "
              f"{whole} of {len(ours)} answers the same")  # fmt: skip
    sys.exit(worst < NEEDED)


if __name__ == "__main__":
    main()
