"""Ranks that agree are found sound, and each planted mistake is named with rank and line."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fspo.lab.trace.match import find_awaited, match
from megatron_fspo.lab.trace.record import Call, Event, Made, Site, Wait

World = dict[int, list[Event]]
RANKS = range(4)
GROUPS = {"0": (0, 1, 2, 3), "1": (0, 1), "2": (2, 3), "3": (0, 2), "4": (1, 3)}
"""Two by two: of all ranks, of rows and of columns."""
KINDS = {"0": "world", "1": "tp", "2": "tp", "3": "dp", "4": "dp"}
MADE = [Made(group=name, ranks=ranks, about=KINDS[name]) for name, ranks in GROUPS.items()]


def line(number: int) -> Site:
    return Site("megatron_fspo/step.py", number, "step")


def program(*steps: tuple[str, dict[str, Any]]) -> World:
    """The events of all ranks of a program: (kind of group, fields of the call)."""
    events: World = {rank: list(MADE) for rank in RANKS}
    for number, (kind, fields) in enumerate(steps):
        for name in (name for name in GROUPS if KINDS[name] == kind):
            for rank in GROUPS[name]:
                events[rank] += calls_of(name, rank, number, dict(fields))
    return events


def calls_of(group: str, rank: int, number: int, fields: dict[str, Any]) -> list[Event]:
    """What a rank does in a step; a message goes from the first of a group to its last, in two calls."""
    me, ranks = GROUPS[group].index(rank), GROUPS[group]
    if fields["name"] == "message":
        ends = {0: ("send", len(ranks) - 1), len(ranks) - 1: ("recv_", 0)}
        if me not in ends:
            return []
        fields["name"], fields["root"] = ends[me]
    if fields["name"] == "alltoall_base_":
        fields["gives"] = tuple(10 * me + other for other in range(len(ranks)))
        fields["takes"] = tuple(10 * other + me for other in range(len(ranks)))
        fields["counts"] = (sum(fields["takes"]), sum(fields["gives"]))
    return [Call(group=group, phase="update", site=line(number), **fields)]


reduction = {"name": "allreduce_", "dtypes": ("float32",), "counts": (8,), "reduction": "SUM", "blocks": True}
STEPS: Sequence[dict[str, Any]] = (
    reduction,
    reduction | {"counts": (16,), "reduction": "MAX"},
    {"name": "broadcast_", "dtypes": ("int64",), "counts": (2,), "root": 0, "blocks": True},
    {"name": "_allgather_base_", "dtypes": ("bfloat16",), "counts": (8, 4), "blocks": True},
    {"name": "alltoall_base_", "dtypes": ("bfloat16",), "blocks": True},
    {"name": "message", "dtypes": ("bfloat16",), "counts": (4,), "blocks": True},
)
programs = st.lists(st.tuples(st.sampled_from(["world", "tp", "dp"]), st.sampled_from(STEPS)), max_size=12)


@given(programs)
@settings(max_examples=60, deadline=None)
def test_a_program_that_all_ranks_run_is_sound(steps: list[tuple[str, dict[str, Any]]]) -> None:
    assert match(program(*steps)) == []


BASE: Sequence[tuple[str, dict[str, Any]]] = tuple(
    (kind, step) for step in STEPS for kind in ("tp", "world", "dp")
)


@given(st.integers(0, 3), st.data())
@settings(max_examples=60, deadline=None)
def test_any_call_that_one_rank_skips_or_changes_is_named(rank: int, data: st.DataObject) -> None:
    events = program(*BASE)
    places = [at for at, event in enumerate(events[rank]) if isinstance(event, Call)]
    at = data.draw(st.sampled_from(places))
    call = events[rank][at]
    assert isinstance(call, Call)
    change = data.draw(st.sampled_from(["skip", "dtype", "count", "again"]))
    new = {
        "skip": [],
        "dtype": [replace(call, dtypes=("float64",))],
        "count": [replace(call, counts=(*call.counts[:-1], call.counts[-1] + 1))],
        "again": [call, call],
    }[change]
    if change == "count" and call.name == "alltoall_base_":
        new = [replace(call, gives=(*call.gives[:-1], call.gives[-1] + 1))]
    events[rank][at : at + 1] = new
    text = "\n".join(match(events))
    kept = (
        change == "count" and call.name == "alltoall_base_" and GROUPS[call.group][-1] == rank
    )  # its own rows
    assert kept or (re.search(rf"ranks? [-,\d ]*\b{rank}\b", text) and "megatron_fspo/step.py:" in text), text


def planted(events: World, rank: int, fault: Callable[[list[Event]], list[Event]]) -> str:
    return "\n".join(match(events | {rank: fault(events[rank])}))


def changed(at: int, **fields: Any) -> Callable[[list[Event]], list[Event]]:
    """One call of a rank, by its number, with other fields."""

    def fault(events: list[Event]) -> list[Event]:
        place = [n for n, event in enumerate(events) if isinstance(event, Call)][at]
        return [*events[:place], replace(events[place], **fields), *events[place + 1 :]]

    return fault


def test_where_two_ranks_differ_their_siblings_tell_which_is_odd() -> None:
    text = planted(program(("tp", reduction)), 2, changed(0, counts=(9,)))
    assert text.splitlines() == [
        "tp (2,3): call 0",
        "  rank 2: allreduce float32 [9] SUM  megatron_fspo/step.py:0 step (update)",
        "  rank 3: allreduce float32 [8] SUM  megatron_fspo/step.py:0 step (update)",
    ]


def test_a_group_in_another_order() -> None:
    events = program()
    events[1][1:3] = events[1][2:0:-1]
    assert match(events) == ["groups\n  rank 1 makes tp (2,3)\n  rank 0 makes tp (0,1)"]


def test_two_communicators_in_another_order_wait_in_a_circle() -> None:
    events = program(("world", reduction), ("tp", reduction))
    events[1][-2:] = events[1][:-3:-1]
    (text,) = match(events)
    assert text.startswith("ranks wait in a circle, with a communicator per group")
    assert "rank 1 waits in tp (0,1)" in text and "step.py:1 step" in text


def both_send_first(*, batch: bool, wait: bool) -> World:
    """Ranks 0 and 1 send to each other, then receive: asynchronous calls that are waited for at the end."""
    events: World = {rank: list(MADE) for rank in RANKS}
    for rank in (0, 1):
        for number, name in enumerate(("send", "recv_")):
            events[rank].append(
                Call("1", name, counts=(4,), root=1 - rank, batch=0 if batch else None, site=line(number))
            )
            if wait:
                events[rank].append(Wait(len(events[rank]) - 1))
        events[rank].append(Wait(None))
    return events


def test_ranks_that_both_send_first() -> None:
    (text,) = match(both_send_first(batch=False, wait=True))
    assert (
        "rank 0 waits in tp (0,1): send [4] root 1  megatron_fspo/step.py:0 step" in text and "rank 1" in text
    )
    assert match(both_send_first(batch=True, wait=False)) == []


def test_a_send_where_the_other_expects_to_receive() -> None:
    events = program(("tp", STEPS[5]))
    text = planted(events, 1, changed(0, name="send"))
    assert "tp (0,1), of the first to the second: call 0\n  rank 1: nothing" in text
    assert "tp (1,0), of the first to the second: call 0\n  rank 0: nothing" in text


def test_an_asynchronous_call_is_waited_for_where_the_stream_does() -> None:
    """Two reductions begun in either order, and waited for later, run in two communicators."""
    events: World = {rank: list(MADE) for rank in RANKS}
    for rank in RANKS:
        groups = [name for name in ("0", "1", "2") if rank in GROUPS[name]]
        for name in groups if rank != 1 else groups[::-1]:
            events[rank].append(Call(name, "allreduce_", site=line(int(name))))
        events[rank].append(Wait(None))
    (text,) = match(events)
    assert text.startswith("ranks wait in a circle, with calls in program order")


def dump(*calls: tuple[str, int, bool]) -> list[Event]:
    """Calls of a flight recorder: (group, number, pending)."""
    return [Call(group, "all_reduce", number=n, pending=p, site=line(n)) for group, n, p in calls]


GIVEN = {made.group: made for made in MADE}


def test_the_rank_that_is_awaited_is_at_the_end_of_the_chain() -> None:
    """Rank 3 left the job's loop; rank 1 waits for it, and rank 0 for rank 1."""
    events = {
        0: dump(("0", 1, False), ("1", 1, True)),
        1: dump(("0", 1, False), ("4", 1, True)),
        2: dump(("0", 1, False), ("2", 1, True)),
        3: dump(("0", 1, False)),
    }
    (text,) = find_awaited(events, GIVEN)
    first, last, *others = text.splitlines()
    assert first == "rank 3 is awaited"
    assert last == "  rank 3 last: all_reduce  megatron_fspo/step.py:1 step"
    assert len(others) == 3 and others[0].startswith("  rank 0 waits in tp (0,1): all_reduce")


@pytest.mark.parametrize(
    ("events", "about"),
    [
        ({0: dump(("1", 1, True)), 1: dump(("1", 1, True))}, "all ranks are there: a network or a GPU"),
        ({0: dump(("1", 1, True), ("3", 1, True))}, "rank 1 is awaited\n  rank 1 without a dump: nothing"),
        (
            {
                0: dump(("1", 1, True)),
                1: dump(("4", 1, True)),
                3: dump(("2", 1, True)),
                2: dump(("3", 1, True)),
            },
            "ranks wait for each other",
        ),
    ],
)
def test_other_hangs(events: World, about: str) -> None:
    assert find_awaited(events, GIVEN)[0].startswith(about)


def test_calls_that_a_dump_no_longer_has_are_no_difference() -> None:
    events = {0: dump(*(("1", n, False) for n in range(5, 9))), 1: dump(*(("1", n, False) for n in range(9)))}
    assert find_awaited(events, GIVEN) == []
    events[1][6] = replace(events[1][6], dtypes=("Long",))  # type: ignore[arg-type]
    assert find_awaited(events, GIVEN)[0].startswith("tp (0,1): call 6\n  rank ")
