"""Attention in a pack: causal in each sequence; the keys of a prefix that sequences share are visible to all.

It is made of flash kernels: each block attends to itself, the sequences of a prefix together to the prefix,
and the log-sum-exps of the two say how to merge them. The backward of a kernel is given the merged output and
log-sum-exp, from which it finds the true weights of its part, as in ring attention (arXiv 2310.01889). On a
GPU, in 16 bits, two calls of torch's FlashAttention-2 do all blocks and all prefixes of a pack. Elsewhere it
is made of masks: exact, and slow.

Shapes: t tokens, h heads, g KV heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fspo.packing.batch import Prefix


class Part(NamedTuple):
    """Rows that attend to rows."""

    queries: slice
    keys: slice
    causal: bool
    """Both are the same; else each query sees every key."""


def parts_of(borders: Sequence[int], prefixes: Sequence[Prefix]) -> list[Part]:
    """Every block on itself, then the sequences of each prefix on the prefix."""
    parts = [Part(slice(*block), slice(*block), True) for block in pairwise(borders)]
    for prefix in prefixes:
        last = borders[borders.index(prefix.end) + len(prefix.sequences)]
        parts.append(Part(slice(prefix.end, last), slice(prefix.start, prefix.end), False))
    return parts


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    borders: Sequence[int],
    prefixes: Sequence[Prefix],
    *,
    scale: float | None = None,
) -> Tensor:
    """Attend.

    Args:
        query: [t, h, d].
        key: [t, g, d].
        value: like ``key``.
        borders: of the blocks, 0 and t included.
        prefixes: blocks whose keys those after them see.
        scale: of the products; default 1 / √d.

    Returns:
        [t, h, d].
    """
    out: Tensor
    if query.device.type != "cpu" and query.element_size() == 2:
        calls = calls_of(tuple(borders), tuple(prefixes), query.device)
        out = VarlenAttention.apply(query, key, value, calls, scale)  # type: ignore[no-untyped-call]
        return out
    parts = parts_of(borders, prefixes)
    if query.device.type == "cpu":
        out = _Merged.apply(query, key, value, parts, scale)  # type: ignore[no-untyped-call]
        return out
    return masked(query, key, value, parts, scale)


def masked(query: Tensor, key: Tensor, value: Tensor, parts: Sequence[Part], scale: float | None) -> Tensor:
    """Attend by masks, block by block."""
    rows = []
    for block, *_ in (part for part in parts if part.causal):
        seen = [p.keys for p in parts if p.queries.start <= block.start < p.queries.stop]
        keys, values = (torch.cat([x[s] for s in reversed(seen)]) for x in (key, value))
        count = block.stop - block.start
        mask = torch.ones(count, len(keys), dtype=torch.bool, device=query.device).tril(len(keys) - count)
        how = {"is_causal": True} if count == len(keys) else {"attn_mask": mask}
        q, k, v = map(_batch, (query[block], keys, values))
        row = F.scaled_dot_product_attention(q, k, v, **how, scale=scale, enable_gqa=True)
        rows.append(row[0].transpose(0, 1))
    return torch.cat(rows)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: Sequence[Part], scale: float | None
    ) -> Tensor:
        out = torch.empty_like(query)
        wide = torch.promote_types(query.dtype, torch.float32)
        logs = query.new_empty(query.shape[1], len(query), dtype=wide)
        for rows, keys, causal in parts:
            one, log = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _batch(query[rows]), _batch(key[keys]), _batch(value[keys]), 0.0, causal, scale=scale
            )
            one, log = one[0].transpose(0, 1), log[0]
            if not causal:
                before = logs[:, rows]
                total = torch.logaddexp(before, log)
                one = out[rows] * _weights(before - total) + one * _weights(log - total)
                log = total
            out[rows], logs[:, rows] = one, log
        ctx.save_for_backward(query, key, value, out, logs)
        ctx.parts, ctx.scale = parts, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logs = ctx.saved_tensors
        slopes = [torch.empty_like(x) for x in (query, key, value)]
        for rows, keys, causal in ctx.parts:
            added = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _batch(grads[0][rows]),
                *(_batch(query[rows]), _batch(key[keys]), _batch(value[keys])),
                *(_batch(out[rows]), logs[None, :, rows], 0.0, causal),
                scale=ctx.scale,
            )
            for slope, at, more in zip(slopes, (rows, keys, keys), added, strict=True):
                more = more[0].transpose(0, 1)
                slope[at] = more if causal else slope[at] + more
        return *slopes, None, None


def _batch(rows: Tensor) -> Tensor:
    """[n, h, d] as a batch of one, [1, h, n, d]."""
    return rows.transpose(0, 1)[None]


def _weights(logs: Tensor) -> Tensor:
    """[h, n] as factors of [n, h, d]."""
    return logs.exp().T[..., None]


class Call(NamedTuple):
    """Parts that one kernel for sequences of different lengths does."""

    queries: Tensor
    """[n] rows."""
    keys: Tensor
    sizes: tuple[Tensor, Tensor, int, int]
    """Borders of the parts in ``queries`` and in ``keys``, int32, and the longest of each."""
    causal: bool


@lru_cache(maxsize=4)
def calls_of(borders: tuple[int, ...], prefixes: tuple[Prefix, ...], device: torch.device) -> list[Call]:
    """All blocks on themselves, then all sequences of prefixes; the same for all layers of a micro-batch."""
    calls = []
    parts = parts_of(borders, prefixes)
    for causal in (True, False) if prefixes else (True,):
        sides = list(zip(*(part[:2] for part in parts if part.causal is causal), strict=True))
        lengths = [torch.tensor([rows.stop - rows.start for rows in side]) for side in sides]
        tensors = [torch.cat([torch.arange(rows.start, rows.stop) for rows in side]) for side in sides]
        tensors += [F.pad(some.cumsum(0), (1, 0)).int() for some in lengths]
        if device.type == "cuda":
            tensors = [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
        queries, keys, *ends = tensors
        sizes = (ends[0], ends[1], int(lengths[0].max()), int(lengths[1].max()))
        calls.append(Call(queries, keys, sizes, causal))
    return calls


class VarlenAttention(torch.autograd.Function):
    """:class:`_Merged` by kernels that take many sequences in one call."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, calls: Sequence[Call], scale: float | None
    ) -> Tensor:
        own, *others = calls
        out: Tensor
        out, logs, *seeds = _varlen(query, key, value, *own.sizes, 0.0, True, False, scale=scale)[:4]
        for rows, keys, sizes, _ in others:
            one, log, *_ = _varlen(
                query[rows], key[keys], value[keys], *sizes, 0.0, False, False, scale=scale
            )
            before = logs[:, rows]
            total = torch.logaddexp(before, log)
            merged = out[rows] * _weights(before - total) + one * _weights(log - total)
            out[rows], logs[:, rows] = merged.to(out.dtype), total
        ctx.save_for_backward(query, key, value, out, logs, *seeds)
        ctx.calls, ctx.scale = calls, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logs, *seeds = ctx.saved_tensors
        own, *others = ctx.calls
        slope = grads[0].contiguous()
        how = {"scale": ctx.scale}
        slopes = _varlen_backward(slope, query, key, value, out, logs, *own.sizes, 0.0, True, *seeds, **how)
        for rows, keys, sizes, _ in others:
            tensors = (slope[rows], query[rows], key[keys], value[keys], out[rows], logs[:, rows])
            added = _varlen_backward(*tensors, *sizes, 0.0, False, *seeds, **how)
            for whole, at, more in zip(slopes, (rows, keys, keys), added, strict=True):
                whole.index_add_(0, at, more)
        return *slopes, None, None


_varlen: Any = torch.ops.aten._flash_attention_forward
_varlen_backward: Any = torch.ops.aten._flash_attention_backward
