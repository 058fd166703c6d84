"""The side of :mod:`against_trl` that is plain torch and transformers: what an update costs at least.

Packs without padding, attention sequence by sequence (on a CPU torch has no kernel for jagged tensors, and
padding takes longer), logits of response tokens only, nothing computed twice, gradients reduced as one
tensor, fused AdamW, products by oneDNN where that is faster; no metrics, and prompts are not shared.

Reads a job as JSON from the file that is its argument, and writes response tokens and seconds of every step
beside it: of the pass before the first update and all updates, on random tokens in the job's lengths.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from megatron_fspo.mcore.machine.cpu_products import install_products, onednn_is_faster

Response = tuple[Tensor, Tensor]
"""Tokens of a prompt and of its response; their advantage is 1."""
Step = Callable[[Sequence[Sequence[Response]]], None]
"""Takes this rank's responses of each mini-batch: the old pass, then all optimizer steps."""


class Pack:
    """Sequences one after the other; logits at ``rows`` predict ``targets``."""

    def __init__(self, responses: Sequence[Response]) -> None:
        tokens = torch.cat([part for one in responses for part in one])
        positions = torch.cat([torch.arange(size_of(one)) for one in responses])
        taught = torch.cat([torch.arange(size_of(one)) >= len(one[0]) for one in responses])
        self.inputs = {"input_ids": tokens[None], "position_ids": positions[None]}
        self.rows, self.targets = taught.nonzero().flatten() - 1, tokens[taught]
        self.lengths = [len(response) for _, response in responses]

    def log_probs(self, model: Any) -> Tensor:
        """Of its response tokens."""
        hidden = model.model(**self.inputs, use_cache=False).last_hidden_state[0, self.rows]
        return -F.cross_entropy(model.lm_head(hidden), self.targets, reduction="none")

    def loss(self, log_probs: Tensor, old: Tensor) -> Tensor:
        """The clipped objective of sequence-level ratios, summed."""
        means = torch.stack([part.mean() for part in (log_probs - old).split(self.lengths)])
        return -torch.minimum(means.exp(), means.exp().clamp(0.8, 1.2)).sum()


def size_of(response: Response) -> int:
    """Tokens of it and its prompt."""
    return sum(map(len, response))


def attend(module: Any, *states: Any, scaling: float, **more: Any) -> tuple[Tensor, None]:
    """Causal attention of each sequence; one begins where a position is 0. States are query, key, value."""
    positions = more["position_ids"][0]
    starts = (positions == 0).nonzero().flatten().tolist()
    sizes = [end - start for start, end in zip(starts, [*starts[1:], len(positions)], strict=True)]
    parts = [
        F.scaled_dot_product_attention(*one, is_causal=True, scale=scaling, enable_gqa=True)
        for one in zip(*(state.split(sizes, 2) for state in states[:3]), strict=True)
    ]
    return torch.cat(parts, 2).transpose(1, 2), None


AttentionInterface.register("alone", attend)


def packs_of(responses: Sequence[Response], max_tokens: int) -> list[Pack]:
    """As few as hold them, of about one size."""
    ordered = sorted(responses, key=size_of)
    count = 1
    while any(sum(map(size_of, ordered[i::count])) > max_tokens for i in range(count)):
        count += 1
    return [Pack(ordered[i::count]) for i in range(count)]


def plain(job: Mapping[str, Any]) -> Step:
    """Of a model in float32, whose gradients are views of one tensor."""
    if onednn_is_faster():
        install_products()
    options = {"dtype": torch.float32, "attn_implementation": "alone"}
    model: Any = AutoModelForCausalLM.from_pretrained(job["model"], **options)
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    gradient = torch.zeros(sum(sizes))
    for parameter, part in zip(parameters, gradient.split(sizes), strict=True):
        parameter.grad = part.view_as(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=job["lr"], fused=True)

    def step(batches: Sequence[Sequence[Response]]) -> None:
        packed = [packs_of(batch, job["max_tokens"]) for batch in batches]
        with torch.no_grad():
            old = [[pack.log_probs(model) for pack in packs] for packs in packed]
        for packs, before in [*zip(packed, old, strict=True)] * job["epochs"]:
            gradient.zero_()
            for pack, log_probs in zip(packs, before, strict=True):
                pack.loss(pack.log_probs(model), log_probs).backward()
            if dist.get_world_size() > 1:
                dist.all_reduce(gradient)
            gradient.div_(job["batch"])
            gradient.mul_((1 / gradient.norm()).clamp(max=1.0))
            optimizer.step()

    return step


def job_file(doc: str | None) -> Path:
    """The argument of a worker."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path, help="written by against_trl.py")
    return parser.parse_args().job


def measure(begin: Callable[[Mapping[str, Any]], Step], path: Path) -> None:
    """Write tokens and seconds of what ``begin`` of the job returns, on this rank's share of responses."""
    job = json.loads(path.read_text())
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    vocab_size, step = AutoConfig.from_pretrained(job["model"]).vocab_size, begin(job)
    tokens, seconds = [], []
    for prompt, batches in zip(job["prompt_tokens"], job["lengths"], strict=True):
        mine = []
        for ordered in map(sorted, batches):  # to each rank as many, and about as long ones
            share = ordered[rank :: 2 * world] + ordered[2 * world - 1 - rank :: 2 * world]
            mine.append([torch.randint(vocab_size, (prompt + n,)).split([prompt, n]) for n in share])
        dist.barrier()
        start = time.perf_counter()
        step(mine)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        tokens.append(sum(len(response) for batch in mine for _, response in batch))
    path.with_suffix(f".{rank}.json").write_text(json.dumps({"tokens": tokens, "update": seconds}))
    dist.destroy_process_group()


if __name__ == "__main__":
    measure(plain, job_file(__doc__))
