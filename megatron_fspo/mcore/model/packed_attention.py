"""Attention in a pack: causal within each sequence, and to the whole prefix that sequences share.

Built from flash kernels: each block attends to itself, and the sequences of a prefix together attend to the
prefix; the two outputs are merged by their log-sum-exps. The kernels' backward gets the merged output and
log-sum-exp, as in ring attention (arXiv 2310.01889). A sink is a logit without a value, merged last; masks
have one more key for it. On a CPU each part is one kernel call. On a GPU, in 16
bits, torch's FlashAttention-2 computes all blocks in one call, and all prefixes in another. In 32 or 64 bits
a GPU uses masks, which is slow.

Shapes: t tokens, h heads, g KV heads, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_fspo.packing.batch import Prefix

_flash: Any = torch.ops.aten._flash_attention_forward
_flash_backward: Any = torch.ops.aten._flash_attention_backward
_flash_on_cpu: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_on_cpu_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


SINK = "self_attention.core_attention.softmax_offset"
"""Megatron's name of a layer's sinks."""


class Part(NamedTuple):
    """Query rows that attend to key rows."""

    queries: slice
    keys: slice
    causal: bool
    """True: queries and keys are the same rows, with a causal mask. False: each query sees every key."""


class Call(NamedTuple):
    """Arguments for one or several parts of one kind, in the form of variable-length kernels."""

    queries: Tensor | slice
    """[n] rows."""
    keys: Tensor | slice
    sizes: tuple[Any, Any, int, int]
    """Borders of the parts in ``queries`` and in ``keys`` (int32 tensors if ``together``), and the longest
    part of each."""
    causal: bool
    together: bool
    """One kernel call computes all parts."""


def layer_window(config: TransformerConfig, layer_number: int) -> int | None:
    """Return the tokens that a token attends to in a layer, counted from 1 over the model; None: all."""
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    return int(config.window_size[0]) + 1


def make_sinks(config: TransformerConfig) -> torch.nn.Parameter | None:
    """Return a rank's sinks [h] if the model has such, to be loaded; each is a logit more in its head's
    softmax, of no token. Megatron's own parameter lacks the mark, without which the gradient norm would
    include the first tensor-parallel rank's only."""
    if config.softmax_type == "vanilla":
        return None
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    sinks = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
    config.init_method(sinks.data)
    set_tensor_model_parallel_attributes(sinks, is_parallel=True, dim=0, stride=1)
    return sinks


def make_parts(borders: Sequence[int], prefixes: Sequence[Prefix]) -> list[Part]:
    """Return the parts: every block on itself, then the sequences of each prefix on the prefix."""
    parts = [Part(slice(*block), slice(*block), True) for block in pairwise(borders)]
    for prefix in prefixes:
        last = borders[borders.index(prefix.end) + len(prefix.sequences)]
        parts.append(Part(slice(prefix.end, last), slice(prefix.start, prefix.end), False))
    return parts


@lru_cache(maxsize=4)
def make_calls(borders: tuple[int, ...], prefixes: tuple[Prefix, ...], device: torch.device) -> list[Call]:
    """Return the call for all blocks, then those for prefixes. Cached for all layers of a micro-batch."""
    parts, together = make_parts(borders, prefixes), device.type != "cpu"
    blocks, others = parts[: len(borders) - 1], parts[len(borders) - 1 :]
    calls = []
    for covered in filter(None, [blocks, *([others] if together else [[part] for part in others])]):
        sides = [[part.queries for part in covered], [part.keys for part in covered]]
        lengths = [[rows.stop - rows.start for rows in side] for side in sides]
        ends: list[Any] = [[0, *accumulate(side)] for side in lengths]
        rows: list[Any] = [side[0] for side in sides]
        if together:
            tensors = [torch.tensor(side, dtype=torch.int32) for side in ends]
            tensors += [torch.cat([torch.arange(rows.start, rows.stop) for rows in side]) for side in sides]
            if device.type == "cuda":
                tensors = [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
            ends, rows = tensors[:2], tensors[2:]
        sizes = (ends[0], ends[1], max(lengths[0]), max(lengths[1]))
        calls.append(Call(rows[0], rows[1], sizes, covered[0].causal, together))
    return calls


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    borders: Sequence[int],
    prefixes: Sequence[Prefix],
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention in a pack: query [t, h, d], key [t, g, d], value [t, g, v] → [t, h, v], v at most d.
    ``borders`` of the blocks include 0 and t; ``scale`` is the factor of query · key, by default 1 / √d. A
    token attends to the last ``window`` tokens of its sequence, itself included; None: to all. ``sinks`` [h]
    are further logits of each row."""
    if missing := query.shape[-1] - value.shape[-1]:  # the kernels need one size
        how: Any = {"scale": scale, "window": window, "sinks": sinks}
        wide = packed_attention(query, key, F.pad(value, (0, missing)), borders, prefixes, **how)
        return wide[..., :-missing]
    # At least as long as any token's sequence.
    longest = max(b - a for a, b in pairwise(borders)) + max((p.end - p.start for p in prefixes), default=0)
    if (window and window < longest) or (query.device.type != "cpu" and query.element_size() > 2):
        return masked(query, key, value, make_parts(borders, prefixes), scale, window, sinks)
    calls = make_calls(tuple(borders), tuple(prefixes), query.device)
    out: Tensor = Merged.apply(query, key, value, calls, scale, sinks)  # type: ignore[no-untyped-call]
    return out


def masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    parts: Sequence[Part],
    scale: float | None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention with masks, block by block."""
    rows = []
    for block, *_ in (part for part in parts if part.causal):
        seen = [p.keys for p in parts if p.queries.start <= block.start < p.queries.stop]
        keys, values = (torch.cat([x[s] for s in reversed(seen)]) for x in (key, value))
        count = block.stop - block.start
        mask = None
        if count < len(keys) or window is not None or sinks is not None:
            before = len(keys) - count
            mask = torch.ones(count, len(keys), dtype=torch.bool, device=query.device).tril(before)
            mask = mask.triu(before - window + 1) if window is not None else mask
        q, k, v = (_batch(x) for x in (query[block], keys, values))
        rows.append(attend(q, k, v, mask, scale, sinks)[0].transpose(0, 1))
    return torch.cat(rows)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of query [b, h, n, d] to key and value [b, g, m, d], and sinks [h], → [b, h, n, d].
    ``mask`` [n, m] is True where a row sees a key; None: causal, and without sinks."""
    size, width = query.shape[-1], value.shape[-1]
    if sinks is not None:
        assert mask is not None
        # One more key with value 0, whose logit is the product of two more values; 8 keep kernels aligned.
        scale = size**-0.5 if scale is None else scale
        logits = (sinks / scale).to(query.dtype)[:, None, None].expand(*query.shape[:-1], 1)
        query = F.pad(torch.cat([query, logits], -1), (0, 7))
        key = torch.cat([F.pad(key, (0, 8)), F.pad(key.new_ones(*key.shape[:2], 1, 1), (size, 7))], 2)
        value, mask = F.pad(value, (0, 8, 0, 1)), F.pad(mask, (0, 1), value=True)
    how = {"is_causal": True} if mask is None else {"attn_mask": mask}
    out = F.scaled_dot_product_attention(query, key, value, **how, scale=scale, enable_gqa=True)
    return out[..., :width]


class Merged(torch.autograd.Function):
    """Runs the flash kernels of several calls and merges their outputs; the first call has all rows."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        calls: Sequence[Call],
        scale: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        own, *others = calls
        out, logs, *seeds = _attend(query, key, value, own, scale)
        for call in others:
            rows, keys, *_ = call
            one, log, *_ = _attend(query[rows], key[keys], value[keys], call, scale)
            before = logs[:, rows]
            total = torch.logaddexp(before, log)
            merged = out[rows] * _weights(before - total) + one * _weights(log - total)
            out[rows], logs[:, rows] = merged.to(out.dtype), total
        if sinks is not None:
            total = torch.logaddexp(logs, sinks[:, None].to(logs.dtype))
            out, logs = (out * _weights(logs - total)).to(out.dtype), total
        ctx.save_for_backward(query, key, value, sinks, out, logs, *seeds)
        ctx.calls, ctx.scale = calls, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, logs, *seeds = ctx.saved_tensors
        slope = grads[0].contiguous()
        own, *others = ctx.calls
        slopes = _gradients(slope, query, key, value, out, logs, own, seeds, ctx.scale)
        for call in others:
            rows, keys, *_ = call
            tensors = (slope[rows], query[rows], key[keys], value[keys], out[rows], logs[:, rows])
            added = _gradients(*tensors, call, seeds, ctx.scale)
            for whole, at, more in zip(slopes, (rows, keys, keys), added, strict=True):
                whole[at] += more
        of_sinks = None
        if sinks is not None:  # whose value is 0
            share = (sinks[:, None].to(logs.dtype) - logs).exp()
            of_sinks = -(share * (slope * out).sum(-1, dtype=logs.dtype).T).sum(1).to(sinks.dtype)
        return *slopes, None, None, of_sinks


def _attend(query: Tensor, key: Tensor, value: Tensor, call: Call, scale: float | None) -> list[Tensor]:
    """Return the output [n, h, d], log-sum-exps [h, n], and further tensors for backward."""
    if call.together:
        return list(_flash(query, key, value, *call.sizes, 0.0, call.causal, False, scale=scale)[:4])
    outs, logs = [], []
    for rows, keys in _sequences(call):
        batches = (_batch(query[rows]), _batch(key[keys]), _batch(value[keys]))
        out, log = _flash_on_cpu(*batches, 0.0, call.causal, scale=scale)
        outs.append(out[0].transpose(0, 1))
        logs.append(log[0])
    return [torch.cat(outs), torch.cat(logs, dim=1)]


def _gradients(
    slope: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logs: Tensor,
    call: Call,
    seeds: Sequence[Tensor],
    scale: float | None,
) -> list[Tensor]:
    """Return the gradients of query, key and value."""
    if call.together:
        kept = (query, key, value, out, logs)
        return list(_flash_backward(slope, *kept, *call.sizes, 0.0, call.causal, *seeds, scale=scale))
    slopes = [torch.empty_like(x) for x in (query, key, value)]
    for rows, keys in _sequences(call):
        batches = (_batch(query[rows]), _batch(key[keys]), _batch(value[keys]), _batch(out[rows]))
        some = _flash_on_cpu_backward(
            _batch(slope[rows]), *batches, logs[None, :, rows], 0.0, call.causal, scale=scale
        )
        for whole, at, gradient in zip(slopes, (rows, keys, keys), some, strict=True):
            whole[at] = gradient[0].transpose(0, 1)
    return slopes


def _sequences(call: Call) -> Iterator[tuple[slice, slice]]:
    """Yield each part's rows in the call's queries and keys."""
    queries, keys = map(pairwise, call.sizes[:2])
    return ((slice(*rows), slice(*others)) for rows, others in zip(queries, keys, strict=True))


def _batch(rows: Tensor) -> Tensor:
    """Return [n, h, d] → a batch of one, [1, h, n, d]."""
    return rows.transpose(0, 1)[None]


def _weights(logs: Tensor) -> Tensor:
    """Return log-weights [h, n] → factors of [n, h, d]."""
    return logs.exp().T[..., None]
