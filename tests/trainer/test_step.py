"""A step under way, written and read back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.errors import InputError
from megatron_fspo.mcore.policy import Update
from megatron_fspo.packing.pack import Pack, PackLayout, Packs, collate_packs
from megatron_fspo.packing.sequences import Sequences
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.record.records import SequenceRecord
from megatron_fspo.trainer.step import Step, read_step
from mismatch_cases import packed, responses
from rollouts import as_rollout


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def groups() -> ParallelGroups:
    world = dist.group.WORLD
    assert world is not None
    return ParallelGroups(tp=world, pp=world, cp=world, ep=world, dp=world, dp_cp=world)


def make(packs: list[list[int]]) -> tuple[Step, Packs]:
    """A step after one optimizer step, in these packs."""
    samples, deltas = responses()
    batches = packed(samples, deltas, packs)
    weights = [torch.rand(batch.mask.shape, dtype=torch.float64) for batch in batches]
    batches = batches.with_columns(rollout_weights=weights)
    record = SequenceRecord(
        sample=2,
        rank=0,
        length=30,
        log_ratio_sum=0.1 + 0.2,
        advantage=-1.0,
        clipped_low=0.0,
        clipped_high=1.0,
        dual_clipped=0.0,
        out_of_band=True,
        nonfinite=False,
    )
    update = Update(
        totals={"actor/entropy": (0.0, 0.0), "fspo/kl_k3": (0.1 + 0.2, 3.0)},
        grad_norm=0.5,
        learning_rate=1e-4,
    )
    step = Step(
        rollout=as_rollout(samples),
        packs=batches,
        sizes=[len(packs)],
        metrics={"critic/rewards/mean": 0.1},
        warm=True,
        updates=[update],
        first={"fspo/on_policy_abs_s_max": 0.0},
        off_policy=[record],
        nonfinite=1,
        dropped=[replace(record, sample=1, nonfinite=True)],
    )
    return step, batches


def back(step: Step, folder: Path, packs: list[list[int]]) -> Step:
    """What is read back, in these packs."""
    step.write(folder, groups())
    state = json.loads(json.dumps(step.state_dict()))
    samples, deltas = responses()
    prompts = [sample.prompt for sample in samples]

    def pack(rollout: object, read: object, dropped: object) -> tuple[Packs, list[int]]:
        assert callable(read) and dropped == [1]
        numbers = sorted(number for pack in packs for number in pack)
        sequences = read(numbers)
        assert sequences.index.tolist() == numbers
        totals = packed(samples, deltas, packs).totals
        wanted = [Pack(numbers=tuple(pack), totals=totals) for pack in packs]
        return collate_packs(sequences, wanted, PackLayout()), [len(packs)]

    return read_step(folder, state, prompts, pack)


def inside(packs: Packs, name: str) -> list[Tensor]:
    """A column at response tokens, in the order of sequences and places."""
    found = {}
    for number, batch in enumerate(packs):
        for row, sample in enumerate(batch.sample_index.tolist()):
            found[sample] = packs.columns[name][number][batch.mask & (batch.segment == row)]
    return [found[sample] for sample in sorted(found)]


@pytest.mark.parametrize("after", [[[0, 1, 2, 3, 4]], [[4, 2], [3, 0], [1]], [[], [2, 0, 1, 3, 4]]])
def test_it_goes_on_in_any_packs(tmp_path: Path, after: list[list[int]]) -> None:
    step, batches = make([[4, 2], [3, 0], [1]])
    got = back(step, tmp_path, after)
    assert str(got.state_dict()) == str(step.state_dict())  # NaN is not NaN
    assert got.updates == step.updates and got.dropped == step.dropped
    for name in ("lengths", "rewards", "advantages", "owner", "truncated"):
        assert torch.equal(getattr(got.rollout, name), getattr(step.rollout, name)), name
    for name in ("old_log_probs", "rollout_weights"):
        for one, two in zip(inside(got.packs, name), inside(batches, name), strict=True):
            assert torch.equal(one, two), name
    tokens = {number: row[:3] for number, row in got.packs.sequences.rows().items()}
    for number, row in batches.sequences.rows().items():
        assert all(torch.equal(a, b) for a, b in zip(tokens[number], row[:3], strict=True))


def test_a_step_in_which_nothing_is_packed(tmp_path: Path) -> None:
    step, batches = make([[], []])
    nothing = Sequences.of(prompts=[], responses=[], advantages=[])
    step.packs = Packs(nothing, list(batches), "cpu", batches.columns)
    got = back(step, tmp_path, [[], []])
    assert [column.sum() for column in got.packs.columns["old_log_probs"]] == [0, 0]


def test_an_older_step_under_way_is_refused(tmp_path: Path) -> None:
    """Its metrics are means, without the numbers of tokens behind them."""
    step, _ = make([[0, 1, 2, 3, 4]])
    state = step.state_dict()
    del state["format"]
    with pytest.raises(InputError, match="has format 1, of another version"):
        read_step(tmp_path, state, [], lambda **_: None)  # type: ignore[arg-type, return-value]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    step, _ = make([[0, 1, 2, 3, 4]])
    step.write(tmp_path, groups())
    (file,) = (tmp_path / "under_way").glob("tokens_*")
    file.unlink()
    with pytest.raises(InputError, match="5 responses of the step under way are missing"):
        read_step(
            tmp_path,
            step.state_dict(),
            [sample.prompt for sample in responses()[0]],
            lambda rollout, read, dropped: read([0, 1, 2, 3, 4]),
        )
