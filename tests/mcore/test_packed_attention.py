"""Attention with shared prefixes against each sequence attending alone, in float64: values and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_fspo.mcore.model import packed_attention as attention
from megatron_fspo.mcore.model.packed_attention import (
    Merged,
    make_calls,
    make_parts,
    masked,
    packed_attention,
)
from megatron_fspo.packing.batch import Prefix

KV_HEADS, SIZE = 2, 8

# A prefix (0: none) and its sequences.
Units = list[tuple[int, list[int]]]


def geometry(units: Units) -> tuple[list[int], list[Prefix], list[list[int]]]:
    """Borders, prefixes, and the rows that each sequence consists of; a prefix alone is one as well."""
    borders, prefixes, sequences, number = [0], [], [], 0
    for prefix, lengths in units:
        shared = list(range(borders[-1], borders[-1] + prefix))
        if prefix:
            prefixes.append(Prefix(shared[0], shared[-1] + 1, range(number, number + len(lengths))))
            sequences.append(shared)
            borders.append(borders[-1] + prefix)
        for length in lengths:
            sequences.append([*shared, *range(borders[-1], borders[-1] + length)])
            borders.append(borders[-1] + length)
        number += len(lengths)
    return borders, prefixes, sequences


def alone(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: list[list[int]],
    window: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """Each sequence by the formula; rows of a prefix come out the same in all."""
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    for rows in sequences:
        n = len(rows)
        k, v = (x[rows].repeat_interleave(query.shape[1] // KV_HEADS, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[rows], k) / SIZE**0.5
        ahead = torch.arange(n)[:, None] - torch.arange(n)
        scores = scores.masked_fill((ahead < 0) | (ahead >= window), -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, n, 1)], -1)
        weights = scores.softmax(-1)[..., :n]
        out = out.index_copy(0, torch.tensor(rows), torch.einsum("hqk,khd->qhd", weights, v))
    return out


def largest_gaps(
    units: Units, heads: int, attend: Any, window: int = 1000, value_size: int = SIZE
) -> list[float]:
    """Of the output and of the gradients of queries, keys and values."""
    borders, prefixes, sequences = geometry(units)
    generator = torch.Generator().manual_seed(len(borders))
    query, key, value, slope = (
        torch.randn(borders[-1], count, size, generator=generator, dtype=torch.float64, requires_grad=True)
        for count, size in ((heads, SIZE), (KV_HEADS, SIZE), (KV_HEADS, value_size), (heads, value_size))
    )
    outs = [attend(query, key, value, borders, prefixes), alone(query, key, value, sequences, window)]
    got, want = ([o, *torch.autograd.grad(o, (query, key, value), slope.detach())] for o in outs)
    return [(a - b).abs().max().item() for a, b in zip(got, want, strict=True)]


def by_masks(query: Tensor, key: Tensor, value: Tensor, borders: list[int], prefixes: list[Prefix]) -> Tensor:
    return masked(query, key, value, make_parts(borders, prefixes), None)


def of_sequences(query: Tensor, key: Tensor, value: Tensor, sizes: Any, causal: bool, scale: float) -> Any:
    """Output and log-sum-exps [h, n] of a kernel for sequences of different lengths, by the formula."""
    outs, logs = [], []
    for (q0, q1), (k0, k1) in zip(*(pairwise(ends.tolist()) for ends in sizes[:2]), strict=True):
        k, v = (x[k0:k1].repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[q0:q1], k) * scale
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        logs.append(scores.logsumexp(-1))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(outs), torch.cat(logs, 1)


def varlen(query: Tensor, key: Tensor, value: Tensor, *rest: Any, scale: float) -> Any:
    *sizes, dropout, causal, debug = rest
    assert dropout == 0 and not debug and sizes[2:] == [int(ends.diff().max()) for ends in sizes[:2]]
    return *of_sequences(query, key, value, sizes, causal, scale), torch.zeros(2), torch.zeros(()), None


def varlen_backward(
    slope: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logs: Tensor,
    *rest: Any,
    scale: float,
) -> Any:
    """As FlashAttention does it: from the output and the log-sum-exps that it is given."""
    *sizes, _, causal, _, _ = rest
    slopes = [torch.zeros_like(x) for x in (query, key, value)]
    share = query.shape[1] // key.shape[1]
    for (q0, q1), (k0, k1) in zip(*(pairwise(ends.tolist()) for ends in sizes[:2]), strict=True):
        k, v = (x[k0:k1].repeat_interleave(share, dim=1) for x in (key, value))
        weights = (torch.einsum("qhd,khd->hqk", query[q0:q1], k) * scale - logs[:, q0:q1, None]).exp()
        if causal:
            weights = weights.tril()
        steep = torch.einsum("qhd,khd->hqk", slope[q0:q1], v)
        steep = weights * (steep - (slope * out)[q0:q1].sum(-1).T[..., None]) * scale
        slopes[0][q0:q1] = torch.einsum("hqk,khd->qhd", steep, k)
        for into, one in ((slopes[1], (steep, query)), (slopes[2], (weights, slope))):
            whole = torch.einsum("hqk,qhd->khd", one[0], one[1][q0:q1])
            into[k0:k1] = whole.unflatten(1, (-1, share)).sum(2)
    return slopes


@pytest.fixture(autouse=True, scope="module")
def kernels() -> Iterator[None]:
    """In place of those of a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_flash", varlen)
        patch.setattr(attention, "_flash_backward", varlen_backward)
        yield


def by_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    borders: list[int],
    prefixes: list[Prefix],
    sinks: Tensor | None = None,
) -> Tensor:
    """As on a GPU."""
    calls = make_calls(tuple(borders), tuple(prefixes), torch.device("meta"))
    out: Tensor = Merged.apply(query, key, value, calls, SIZE**-0.5, sinks)  # type: ignore[no-untyped-call]
    return out


@pytest.mark.parametrize("attend", [packed_attention, by_masks, by_varlen])
@settings(deadline=None, max_examples=40)
@given(
    units=st.lists(
        st.one_of(
            st.tuples(st.integers(1, 70), st.lists(st.integers(1, 40), min_size=2, max_size=4)),
            st.tuples(st.just(0), st.lists(st.integers(1, 40), min_size=1, max_size=2)),
        ),
        min_size=1,
        max_size=3,
    ),
    heads=st.sampled_from([2, 6]),
)
def test_values_and_gradients(attend: Any, units: Units, heads: int) -> None:
    assert max(largest_gaps(units, heads, attend)) < 1e-12


@pytest.mark.parametrize("attend", [packed_attention, by_varlen])
@pytest.mark.parametrize("window", [1, 7, 11, 1000])
def test_sinks_enter_every_row_once(attend: Any, window: int) -> None:
    """Their gradient, too, over the parts of sequences with shared prompts. One is far above all scores."""
    borders, prefixes, sequences = geometry([(6, [5, 2]), (0, [9]), (3, [1, 4])])
    generator = torch.Generator().manual_seed(1)
    inputs = [
        torch.randn(*size, generator=generator, dtype=torch.float64, requires_grad=True)
        for size in ((borders[-1], 4, SIZE), *[(borders[-1], KV_HEADS, SIZE)] * 2, (4,))
    ]
    inputs[3].data[0] = 30.0
    slope = torch.randn(borders[-1], 4, SIZE, generator=generator, dtype=torch.float64)
    *qkv, sinks = inputs
    how = {"window": window} if attend is packed_attention else {}
    outs = [attend(*qkv, borders, prefixes, sinks=sinks, **how)]
    outs.append(alone(*qkv, sequences, window if how else 1000, sinks))
    got, want = ([o, *torch.autograd.grad(o, inputs, slope)] for o in outs)
    for one, other in zip(got, want, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [1, 7, 11, 12, 1000])
@pytest.mark.parametrize("value_size", [5, SIZE])
def test_a_window_and_smaller_values(window: int, value_size: int) -> None:
    """The longest sequence has 11 tokens, with its prefix."""

    def attend(*arguments: Any) -> Tensor:
        return packed_attention(*arguments, window=window)

    units: Units = [(6, [5, 2]), (0, [9])]
    assert max(largest_gaps(units, 4, attend, window, value_size)) < 1e-12


def test_a_given_scale_and_narrow_numbers() -> None:
    borders, prefixes, _ = geometry([(5, [3, 4]), (0, [2])])
    wide = [torch.randn(14, count, SIZE, dtype=torch.float64) for count in (4, 2, 2)]
    want = by_masks(wide[0] * 0.3 * SIZE**0.5, wide[1], wide[2], borders, prefixes)
    got = packed_attention(*wide, borders, prefixes, scale=0.3)
    assert torch.allclose(got, want, rtol=0, atol=1e-12)
    query, key, value = (x.bfloat16().requires_grad_() for x in wide)
    narrow = packed_attention(query, key, value, borders, prefixes, scale=0.3)
    narrow.sum().backward()
    assert narrow.dtype == query.grad.dtype == key.grad.dtype == torch.bfloat16
    assert torch.allclose(narrow.double(), want, rtol=0, atol=0.05)
