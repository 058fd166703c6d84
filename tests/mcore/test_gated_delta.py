"""The delta rule in chunks is the recurrence, token by token; sequences of a pack do not see one another."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_fspo.mcore.model.gated_delta import CachedDelta, DeltaCore, delta_rule
from megatron_fspo.weights.architecture import LinearAttention

LINEAR = LinearAttention(key_heads=2, value_heads=4, key_size=6, value_size=5, conv=4)
CHANNELS = 2 * (2 * 6 + 2 * 5)


def recurrence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, memory: Tensor) -> Tensor:
    found = []
    for t in range(q.shape[1]):
        memory = memory * decay[:, t, :, None, None].exp()
        known = (memory * k[:, t, :, :, None]).sum(2)
        written = rate[:, t, :, None] * (v[:, t] - known)
        memory = memory + k[:, t, :, :, None] * written[:, :, None]
        found.append((memory * q[:, t, :, :, None]).sum(2) / q.shape[-1] ** 0.5)
    return torch.stack(found, 1)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 200])
def test_chunks_are_the_recurrence(tokens: int) -> None:
    torch.manual_seed(tokens)
    q, k = (F.normalize(drawn(2, tokens, 4, 6), dim=-1) for _ in range(2))
    inputs = [q, k, drawn(2, tokens, 4, 5), -drawn(2, tokens, 4).exp() * 0.3]
    inputs += [drawn(2, tokens, 4).sigmoid(), drawn(2, 4, 6, 5)]
    for x in inputs:
        x.requires_grad_()
    weight = drawn(2, tokens, 4, 5)
    results = [recurrence(*inputs), delta_rule(*inputs)[0]]
    gradients = [torch.autograd.grad((result * weight).sum(), inputs) for result in results]
    for one, other in zip((results[0], *gradients[0]), (results[1], *gradients[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


def test_a_decay_that_forgets_all_is_finite() -> None:
    inputs = [F.normalize(torch.randn(1, 130, 1, 4), dim=-1).requires_grad_() for _ in range(3)]
    decay = torch.full((1, 130, 1), -80.0, requires_grad=True)
    out, _ = delta_rule(*inputs, decay, torch.ones(1, 130, 1))
    out.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (*inputs, decay))


@pytest.mark.parametrize("lengths", [(70,), (1, 40), (3, 1, 64, 2, 65, 7, 4, 30, 5)])
def test_a_pack_is_its_sequences(lengths: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    tokens = sum(lengths)
    inputs = [drawn(tokens, 1, CHANNELS), drawn(CHANNELS, 1, 4), -drawn(tokens, 1, 4).exp()]
    inputs.append(drawn(tokens, 1, 4).sigmoid())
    for x in inputs:
        x.requires_grad_()
    channels, weight, decay, rate = inputs

    def borders(ends: list[int]) -> PackedSeqParams:
        return PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor(ends, dtype=torch.int32))

    core = DeltaCore(LINEAR)
    ends = [0, *accumulate(lengths)]
    packed = core(*inputs, borders(ends))
    parts = zip(*(x.split(lengths) for x in (channels, decay, rate)), strict=True)
    single = torch.cat([core(c, weight, d, r, borders([0, len(c)])) for c, d, r in parts])
    slope = drawn(*packed.shape)
    gradients = [torch.autograd.grad((out * slope).sum(), inputs) for out in (packed, single)]
    for one, other in zip((packed, *gradients[0]), (single, *gradients[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_session_continues_what_it_keeps() -> None:
    torch.manual_seed(2)
    channels, weight, decay, rate = drawn(9, 3, CHANNELS), drawn(CHANNELS, 1, 4), -drawn(9, 3, 4).exp(), None
    rate = drawn(9, 3, 4).sigmoid()
    core, session = DeltaCore(LINEAR), CachedDelta(LINEAR)
    whole = core.sequence(*(x.transpose(0, 1) for x in (channels, decay, rate)), weight)[0].transpose(0, 1)
    found = [session(channels[:5], weight, decay[:5], rate[:5], None)]
    session.keep([2, 0, 2])
    for t in range(5, 9):
        found.append(session(*(channels[t : t + 1, [2, 0, 2]], weight, decay[t : t + 1, [2, 0, 2]]),
                             rate[t : t + 1, [2, 0, 2]], None))  # fmt: skip
    torch.testing.assert_close(found[0], whole[:5], rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat(found[1:]), whole[5:, [2, 0, 2]], rtol=0, atol=1e-12)
