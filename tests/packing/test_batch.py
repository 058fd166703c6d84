"""Samples packed end to end, against a reading of the same samples one by one."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_fspo.packing.batch import MicroBatch
from megatron_fspo.types import Sample
from packs import collate, make_micro_batches, sample, sample_length

PAD = 0


def pack(samples: list[Sample], indices: list[int], multiple_of: int = 1) -> MicroBatch:
    return collate(samples, indices, num_sequences=11, num_tokens=1000, multiple_of=multiple_of)


def test_two_sequences_and_a_tail_by_hand() -> None:
    samples = [sample([9], [8]), sample([1, 2], [3, PAD, 5], 0.5), sample([6, 7], [4], -2.0)]
    batch = pack(samples, [1, 2], multiple_of=5)
    assert batch.tokens.tolist() == [[1, 2, 3, PAD, 5, 6, 7, 4, 0, 0]]
    assert batch.labels.tolist() == [2, 3, PAD, 5, 0, 7, 4, 0, 0, 0]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 1]]
    # The label PAD of position 2 was sampled: it counts like any other.
    assert [int(flag) for flag in batch.loss_mask] == [0, 1, 1, 1, 0, 0, 1, 0, 0, 0]
    assert batch.rows.tolist() == [1, 2, 3, 6] and batch.label_range == (PAD, 5)
    assert batch.segment.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert batch.borders.tolist() == [0, 5, 8, 10] and batch.borders.dtype == torch.int32
    assert batch.longest == 5
    assert batch.lengths.tolist() == [3, 1]
    assert batch.advantages.tolist() == [0.5, -2.0] and batch.advantages.dtype == torch.float32
    assert batch.sample_index.tolist() == [1, 2]
    assert (batch.totals.num_sequences, batch.totals.num_tokens) == (11, 1000)
    assert batch.old_log_probs is None


token_lists = st.lists(st.integers(0, 3), max_size=6)  # few ids: the padding id comes up often


@given(
    pairs=st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=6), token_lists), max_size=6),
    multiple_of=st.sampled_from([1, 2, 3, 8]),
    data=st.data(),
)
def test_a_pack_reads_back_as_its_samples(
    pairs: list[tuple[list[int], list[int]]], multiple_of: int, data: st.DataObject
) -> None:
    flags = [data.draw(st.lists(st.booleans(), min_size=len(r), max_size=len(r))) for _, r in pairs]
    samples = [sample(*pair, i / 4, flags[i]) for i, pair in enumerate(pairs)]
    learned = [
        [token for token, flag in zip(r, some, strict=True) if flag]
        for (_, r), some in zip(pairs, flags, strict=True)
    ]
    indices = data.draw(st.lists(st.sampled_from(range(len(pairs))), unique=True)) if pairs else []
    batch = pack(samples, indices, multiple_of)

    total = batch.tokens.shape[1]
    filled = sum(sample_length(samples[i]) for i in indices)
    assert total == max(math.ceil(filled / multiple_of), 1) * multiple_of
    assert batch.tokens.shape == batch.position_ids.shape == (1, total)
    borders = batch.borders.tolist()
    assert borders[0] == 0 and borders[-1] == total
    assert batch.longest == max(end - start for start, end in pairwise(borders))

    for row, index in enumerate(indices):
        prompt, response = pairs[index]
        start, end = borders[row], borders[row + 1]
        ids = batch.tokens[0, start:end].tolist()
        assert ids == [*prompt, *response]
        assert batch.position_ids[0, start:end].tolist() == list(range(len(ids)))
        assert batch.labels[start : end - 1].tolist() == ids[1:]
        # What the mask picks out of the labels is what the policy wrote, whatever its ids are.
        mask = batch.loss_mask[start:end]
        assert batch.labels[start:end][mask].tolist() == learned[index]
        assert mask[len(prompt) - 1 : -1].tolist() == flags[index]
        assert batch.segment[start:end].tolist() == [row] * len(ids)
        assert batch.lengths[row] == len(learned[index])
        assert batch.advantages[row] == index / 4
    assert batch.loss_mask[filled:].sum() == 0
    assert torch.equal(batch.loss_mask.nonzero()[:, 0], batch.rows)
    wanted = [token for index in indices for token in learned[index]] or [0]
    assert batch.label_range == (min(wanted), max(wanted))
    assert set(batch.segment[filled:].tolist()) <= {len(indices)}
    assert batch.sample_index.tolist() == indices


@pytest.mark.parametrize("multiple_of", [1, 4])
def test_an_empty_micro_batch_is_one_tail(multiple_of: int) -> None:
    batch = pack([sample([1], [2])], [], multiple_of)
    assert batch.tokens.tolist() == [[0] * multiple_of]
    assert batch.borders.tolist() == [0, multiple_of]
    assert batch.longest == multiple_of
    assert not batch.loss_mask.any() and batch.segment.tolist() == [0] * multiple_of
    assert batch.lengths.shape == batch.advantages.shape == batch.sample_index.shape == (0,)
    assert batch.lengths.dtype == batch.sample_index.dtype == torch.int64
    assert batch.totals.num_sequences == 11
    assert batch.rows.shape == (0,) and batch.label_range == (0, 0)


def test_a_pack_is_copied_from_pinned_memory_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a device that is none, and the host keeps its own."""
    samples = [sample([9], [8]), sample([1, 2], [3, 5])]
    micro_batches = make_micro_batches(samples, [[0], [1]], device="meta").with_columns(
        old_log_probs=["first", "second"]
    )
    pinned, copied, real = [], [], Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copied.append((id(self), kwargs))
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "pin_memory", lambda self: pinned.append(self) or self)
        patch.setattr(Tensor, "to", to)
        batch = micro_batches[1]
    assert batch.turns is not None
    tensors = [*(value for value in vars(batch).values() if isinstance(value, Tensor)), *batch.turns]
    assert len(tensors) > 8 and all(value.is_meta for value in tensors)
    assert copied == [(id(value), {"non_blocking": True}) for value in pinned] and len(pinned) == len(tensors)
    assert batch.source is micro_batches.on_host[1] and batch.source.sample_index.tolist() == [1]
    assert batch.old_log_probs == "second" and batch.label_range == (3, 5)
    on_cpu = make_micro_batches(samples, [[0], [1]])
    assert on_cpu[0].tokens is on_cpu.on_host[0].tokens, "copied without need"
