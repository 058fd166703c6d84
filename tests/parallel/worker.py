"""On every rank: the parallel room against float64 oracles. Prints one line per check that held."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_fspo.config import Config, Reward
from megatron_fspo.errors import TrainingError
from megatron_fspo.packing.zigzag import local_positions
from megatron_fspo.parallel.control import Control
from megatron_fspo.parallel.groups import (
    ParallelGroups,
    any_rank,
    broadcast_first,
    gather_lists,
    means,
    share,
    sum_metrics,
)
from megatron_fspo.parallel.segments import prefix_sums, sequence_sums
from megatron_fspo.rollout.client.scatter import scatter_completions
from megatron_fspo.trainer.advantages import add_advantages
from megatron_fspo.trainer.optimize import check_kl
from megatron_fspo.trainer.rollout import COLUMNS, make_rollout
from megatron_fspo.types import Completion, Prompt, VersionSpan


class _Counter:
    """A Mock would keep the group it was called with, and a gloo group that outlives destroy_process_group
    aborts the interpreter's exit now and then."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        return self.function(*args, **kwargs)


def check_sequence_sums() -> None:
    """Whichever rank owns a token, in any order: the same bits on every rank, and one collective."""
    world, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(5)
    segment = torch.randint(0, 6, (3000,), generator=generator)
    size = torch.randint(-6, 4, (3000,), generator=generator)
    values = torch.randn(2, 3000, generator=generator) * 10.0**size
    mask = torch.rand(3000, generator=generator) < 0.8
    values[:, ~mask] = float("nan")
    values[0, 7], values[1, 8], mask[7:9] = float("nan"), float("inf"), True
    values[1, 7] = values[0, 8] = 1.0

    def sums(values: torch.Tensor, tokens: torch.Tensor, count: int = 5) -> torch.Tensor:
        return sequence_sums(values[:, tokens], mask[tokens], segment[tokens], count, group=dist.group.WORLD)

    found = []
    counter = _Counter(dist.all_reduce)
    with mock.patch.object(dist, "all_reduce", counter):
        for _ in range(4):
            mine = torch.randint(0, world, (3000,), generator=generator) == rank
            order = torch.randperm(int(mine.sum()), generator=torch.Generator().manual_seed(rank))
            found.append(sums(values, mine.nonzero()[order, 0]))
    assert counter.calls == (4 if world > 1 else 0)
    everywhere = [torch.empty_like(found[0]) for _ in range(world)]
    dist.all_gather(everywhere, found[0])
    for other in (*found, *everywhere):
        assert torch.equal(other.view(torch.int32), found[0].view(torch.int32))
    for row, column in ((r, c) for r in range(2) for c in range(5)):
        want = values[row, mask & (segment == column)].double().sum()
        torch.testing.assert_close(
            found[0][row, column].double(), want, rtol=1e-7, atol=1e-12, equal_nan=True
        )
    nowhere = torch.zeros(0, dtype=torch.long)
    assert sums(values.double(), nowhere).dtype == torch.float64 and sums(values, nowhere, 0).shape == (2, 0)


def check_prefix_sums() -> None:
    """Sequences of all sizes in zigzag chunks, and one of three blocks, of which another lies between: the
    same bits as on one rank, one collective."""
    world, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(6)
    lengths = torch.tensor([1, 2, 9, 64, 0, 300, 31])
    owner = torch.tensor([0, 1, 5, 3, 4, 5, 5])
    padded = lengths + -lengths % 24  # splits for 1, 2, 3 and 4 ranks
    borders = torch.cat([padded.new_zeros(1), padded.cumsum(0)])
    block = torch.repeat_interleave(padded)
    position = torch.arange(len(block)) - borders[block]
    size = torch.randint(-6, 4, (len(block),), generator=generator)
    values = torch.randn(2, len(block), generator=generator) * 10.0**size
    mask = (position < lengths[block]) & (position >= lengths[block] // 5)
    values[0, 60], values[1, ~mask] = float("inf"), float("nan")
    mine = local_positions(borders, rank, world)
    counter = _Counter(dist.all_reduce)
    with mock.patch.object(dist, "all_reduce", counter):
        got = prefix_sums(values[:, mine], mask[mine], borders, owner, group=dist.group.WORLD)
    assert counter.calls == (1 if world > 1 else 0) and got.dtype == torch.float32
    for row in range(2):
        for number in owner.unique():
            own = (owner[block] == number) & mask
            want = values[row, own].double().cumsum(0)
            here = own[mine]
            places = (own.cumsum(0) - 1)[mine][here]
            torch.testing.assert_close(got[row, here].double(), want[places], rtol=1e-6, atol=1e-6)
    alone, _ = dist.new_subgroups(1)
    whole = prefix_sums(values, mask, borders, owner, group=alone)[:, mine[mask[mine]]]
    assert torch.equal(whole.view(torch.int32), got[:, mask[mine]].view(torch.int32))


def check_one_decides() -> None:
    """The first rank's tensor on all; nothing is changed in place, no gradient passes."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = torch.full((2, 3), float(rank), requires_grad=True).t()
    got = broadcast_first(mine, dist.group.WORLD)
    assert (got == 0).all() and got.shape == (3, 2) and (mine == rank).all()
    assert got.requires_grad is (world == 1) and broadcast_first(mine) is mine
    assert broadcast_first(torch.zeros(4, 0), dist.group.WORLD).shape == (4, 0)


def check_metrics() -> None:
    """(sum, denominator) pairs: the same mean for every split over ranks and micro-batches."""
    world, rank = dist.get_world_size(), dist.get_rank()
    values = torch.arange(1.0, 25.0)
    want = values.mean().item()
    for pieces in (1, 2, 5):
        mine = values[rank::world].tensor_split(pieces)
        parts = [
            {"a": torch.stack([v.sum(), torch.tensor(float(len(v)))]), "none": torch.zeros(2)} for v in mine
        ]
        reduced = means(sum_metrics(parts, group=dist.group.WORLD))
        assert abs(reduced["a"] - want) < 1e-12 and reduced["none"] != reduced["none"]
    try:
        sum_metrics([{"a": torch.ones(2)}, {"b": torch.ones(2)}], group=dist.group.WORLD)
        raise AssertionError("different names were added up")
    except KeyError:
        pass
    assert gather_lists([rank] * rank, group=dist.group.WORLD) == [r for r in range(world) for _ in range(r)]
    assert share({"rank": rank}, group=dist.group.WORLD) == {"rank": 0}
    assert share(rank, group=dist.group.WORLD, source=-1) == world - 1
    device = torch.device("cpu")
    assert any_rank(rank == world - 1, device=device) and not any_rank(False, device=device)


def check_scatter() -> None:
    """Every rank gets its completions, in their order, equal in every field: from one rank, and from all."""
    world, rank = dist.get_world_size(), dist.get_rank()

    def completions(source: int, to: int) -> list[Completion]:
        found = []
        for number, length in enumerate([3, 0, 1, 5][: (source + to) % 5]):
            first = 1000 * source + 100 * to + 10 * number
            spans = [VersionSpan(version=number + i, start=i, end=i + 1) for i in range(length)]
            found.append(
                Completion(
                    token_ids=range(first, first + length),
                    log_probs=[-(first + i) / 7 for i in range(length)],
                    loss_mask=[(i + to + 1) % 2 for i in range(length)],
                    turn_starts=(number,),
                    row_starts=tuple(range(1 - to % 2, length, 2)) if length > 1 else (),
                    finish_reason="length" if number % 2 else "stop",
                    weight_version=number,
                    reward=None if number % 2 else first / 8,
                    failures=number,
                    environment_seconds=number / 4,
                    version_spans=tuple(spans if to % 2 else spans[:0]),
                    routes=torch.arange(first, first + 6 * (length + 2)).to(torch.uint8).view(-1, 3, 2)[1:]
                    if number % 2
                    else None,
                    route_problem="" if number % 2 else f"none of {first}",
                )
            )
        return found

    def same(got: list[Completion], want: list[Completion]) -> None:
        assert [replace(c, routes=None) for c in got] == [replace(c, routes=None) for c in want]
        for one, other in zip(got, want, strict=True):
            assert one.environment_seconds == other.environment_seconds
            if other.routes is None:
                assert one.routes is None
            else:
                assert one.routes is not None and one.routes.dtype == torch.uint8
                assert torch.equal(one.routes, other.routes)

    for source in range(world):
        parts = [completions(source, to) if rank == source else [] for to in range(world)]
        got = scatter_completions(parts, group=dist.group.WORLD)
        same(got, completions(source, rank))
        assert all(c.token_ids.typecode == "i" and c.log_probs.typecode == "f" for c in got)
    got = scatter_completions([completions(rank, to) for to in range(world)], group=dist.group.WORLD)
    same(got, [c for source in range(world) for c in completions(source, rank)])


def check_first_rank_decides_on_advantages() -> None:
    """A reward of another rank that differs in its last bit gives a group zero variance there."""
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    config = Config.model_construct(reward=Reward(name="math"))
    inputs: Any = SimpleNamespace(config=config, backend=SimpleNamespace(device=torch.device("cpu")))
    groups = ParallelGroups(
        tp=world, pp=world, cp=world, dp=world, dp_cp=world, ep=world, edp=world, control=Control()
    )
    table = torch.zeros(4, len(COLUMNS), dtype=torch.float64)
    table[:, COLUMNS.index("rewards")] = torch.tensor([1.0, 1.0, 0.0, 1.0])
    table[0, COLUMNS.index("rewards")] += 2**-52 * rank
    prompts = [Prompt(index=i, token_ids=(1,), text="", answer="") for i in range(2)]
    got = add_advantages(inputs, groups, make_rollout(prompts, 2, table, {}))
    assert got.has_variance.tolist() == [False, True] and got.advantages.tolist() == [0.0, 0.0, -1.0, 1.0]


def check_any_rank_ends_a_run_beyond_max_kl() -> None:
    """All end with the one that finds it: else the others wait in a collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    beyond = 1e-9 if rank == world - 1 else 0.0
    check_kl({"actor/ppo_kl": (0.25, 1.0)}, 0.25, "step 1", torch.device("cpu"))
    try:
        check_kl({"actor/ppo_kl": (0.25 + beyond, 1.0)}, 0.25, "step 1", torch.device("cpu"))
    except TrainingError as error:
        assert "optimizer.max_kl allows 0.25" in str(error)
    else:
        raise AssertionError(f"rank {rank} goes on alone")


def main() -> None:
    dist.init_process_group("gloo")
    check_scatter()
    check_sequence_sums()
    check_prefix_sums()
    check_one_decides()
    check_metrics()
    check_first_rank_decides_on_advantages()
    check_any_rank_ends_a_run_beyond_max_kl()
    dist.barrier()
    if dist.get_rank() == 0:
        sys.stdout.write(f"all held on {dist.get_world_size()} ranks\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
