"""Memory that a policy lends between its optimizer steps."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from launch import run_worker
from megatron_fspo.mcore.state import offload
from megatron_fspo.mcore.state.offload import Offloadable, starts

HIDDEN, FFN, LAYERS, VOCABULARY = 4096, 12288, 36, 151936
QWEN3_8B = [2 * HIDDEN * VOCABULARY] * 2 + [
    *(2 * HIDDEN * width for width in (6144, 4096, 2 * FFN, FFN)),
    *(2 * width for width in (HIDDEN, HIDDEN, 128, 128)),
    *(4 * 1, 4 * 1),  # counters of an optimizer
] * LAYERS
"""Bytes of tensors that are lent together, bf16."""


@pytest.mark.slow
def test_a_policy_that_lends_its_memory_learns_the_same(random_checkpoints: dict[str, Path]) -> None:
    worker = Path(__file__).with_name("offload_worker.py")
    said = run_worker(worker, str(random_checkpoints["tied"]), nproc=2)
    assert said.count("equal") == 2


@pytest.mark.parametrize("sizes", [[(5 << 30) + 1], QWEN3_8B, [size // 8 for size in QWEN3_8B], []])
def test_host_memory_is_as_large_as_what_it_holds(sizes: list[int]) -> None:
    places = starts(sizes)
    assert sum(sizes) <= places[-1] <= 1.02 * sum(sizes)
    assert not any(at % torch.complex128.itemsize for at in places)
    assert all(at + size <= end for (at, end), size in zip(pairwise(places), sizes, strict=True))


def test_host_memory_is_kept_until_more_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    make = offload.host_memory

    def host_memory(size: int, *, pinned: bool) -> Tensor:
        asked.append(size)
        return make(size, pinned=pinned)

    monkeypatch.setattr(offload, "host_memory", host_memory)
    whole = torch.arange(5000, dtype=torch.int16)
    tensors = [
        whole[:7],
        whole[7:],
        torch.rand(1001).double(),
        torch.tensor(3.0),
        torch.rand(64, 65).bfloat16(),
    ]
    memory = Offloadable(lambda: iter(tensors))
    for calls in (1, 1, 2):
        if calls == 2:
            tensors.append(torch.rand(3000))  # as moments are there after the first step
        before = [tensor.clone() for tensor in tensors]
        memory.lend()
        assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
        memory.take_back()
        assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
        assert len(asked) == calls
        assert asked[-1] <= 1.02 * sum(tensor.nbytes for tensor in tensors)
