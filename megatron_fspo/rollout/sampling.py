"""Drawing one token per row from logits: temperature, top-p, log-probs, and streams that repeat."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def uniforms(seed: int, prompt_index: int, number: int, count: int) -> Tensor:
    """The random stream of one completion: ``count`` numbers in [0, 1), fp64.

    A pure function of its arguments, so a completion does not depend on what else is in the batch, on the
    number of ranks, or on what was sampled before.
    """
    generator = torch.Generator().manual_seed(_stream_name(seed, prompt_index, number) >> 1)
    return torch.rand(count, generator=generator, dtype=torch.float64)


def stream_seed(seed: int, prompt_index: int, number: int) -> int:
    """The same stream for a sampler of its own: a seed in [0, 2³¹), where every sampler takes one."""
    return _stream_name(seed, prompt_index, number) >> 33


def _stream_name(seed: int, prompt_index: int, number: int) -> int:
    """64 well-mixed bits."""
    name = hashlib.blake2b(f"{seed}/{prompt_index}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(name, "little")


def sample(logits: Tensor, draws: Tensor, *, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """Inverse-CDF sampling.

    Args:
        logits: [B, V] fp32.
        draws: [B] in [0, 1).
        temperature: 0 takes the likeliest token, with log-prob 0.
        top_p: keep the likeliest tokens until their probability reaches top_p, and renormalise.

    Returns:
        tokens [B], and their log-probs [B] under the distribution sampled from, in nats.
    """
    if temperature == 0:
        return logits.argmax(-1), logits.new_zeros(logits.shape[0])
    log_probs = torch.log_softmax(logits / temperature, dim=-1)
    if top_p < 1:
        log_probs = _nucleus(log_probs, top_p)
    cumulative = log_probs.double().exp().cumsum(-1)
    # Rounding may leave the last sum below 1: scale the draw, so that it always falls on a token.
    target = draws.to(cumulative)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]


def _nucleus(log_probs: Tensor, top_p: float) -> Tensor:
    ordered, order = log_probs.sort(dim=-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    cut = torch.zeros_like(log_probs, dtype=torch.bool).scatter_(-1, order, before >= top_p)
    return torch.log_softmax(log_probs.masked_fill(cut, float("-inf")), dim=-1)
