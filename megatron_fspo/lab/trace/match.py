"""Compares what the ranks of a job tell NCCL, from events alone.

All ranks are to make the same groups, and in each the same calls with the same types, counts, reduction and
root; messages and pieces of an all-to-all fit in pairs; and no ranks wait for each other in a circle. A call
begins when all that its stream waits for has ended, and ends when all its ranks have begun.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import permutations, zip_longest

from megatron_fspo.job.rank_status import named_ranks
from megatron_fspo.lab.trace.record import Call, Event, Made, Wait

Events = Mapping[int, Sequence[Event]]
"""Rank → what it did, in order."""
Groups = Mapping[str, Made]
Place = tuple[int, int]
"""Rank, and number of an event of it."""
Unit = tuple[int, int | str]
"""Rank, and the number of a call, or the batch that it is in."""
MESSAGES = ("send", "recv_", "recv")
STREAMS = ("a communicator per group", "a communicator per pair of ranks", "calls in program order")
"""In which a call also waits for the one before it."""


def match(events: Events) -> list[str]:
    """Return what is wrong: the first difference of each group; circles only where there is none."""
    made = {rank: [event for event in history if isinstance(event, Made)] for rank, history in events.items()}
    first = min(events)
    for rank, groups_made in made.items():
        for usual, mine in zip_longest(made[first], groups_made):
            if usual != mine:
                return [
                    f"groups\n  rank {rank} makes {_describe(mine)}\n  rank {first} makes {_describe(usual)}"
                ]
    groups = {group.group: group for group in made[first]}
    together, found = _compare(events, groups, begun=False)
    for streams in STREAMS:
        found = found or list(_find_circle(events, groups, together, streams))
    return found


def find_awaited(events: Events, groups: Groups) -> list[str]:
    """Return differences between calls that all of a group began, and which ranks the others wait for."""
    _, found = _compare(events, groups, begun=True)
    calls = {
        rank: [event for event in history if isinstance(event, Call)] for rank, history in events.items()
    }
    reached = {(rank, call.group): call.number or 0 for rank, history in calls.items() for call in history}
    waits, missing = {}, set()
    for rank, history in sorted(calls.items()):
        for call in [call for call in history if call.pending][:1]:
            ranks, number = groups[call.group].ranks, call.number
            peer = [] if call.root is None else [ranks[call.root]]
            missing |= (
                {r for r in ranks if reached.get((r, call.group), -1) < number} if number else set(peer)
            )
            waits[rank] = _format_side([rank], call, f" waits in {_describe(groups[call.group])}")
    texts = [*waits.values()]
    for rank in sorted(missing - set(waits)):
        last = calls[rank][-1] if calls.get(rank) else None
        odd = _format_side([rank], last, " last" if rank in calls else " without a dump")
        found.append("\n".join([f"rank {rank} is awaited", odd, *texts]))
    if waits and missing <= set(waits):
        about = "ranks wait for each other" if missing else "all ranks are there: a network or a GPU"
        found.append("\n".join([about, *texts]))
    return found


def _describe(made: Made | None) -> str:
    if made is None:
        return "no more group"
    ranks = ",".join(map(str, made.ranks)) if len(made.ranks) <= 8 else f"{len(made.ranks)} ranks"
    return f"{made.about.lower() or made.group} ({ranks})"


def _format_side(ranks: Sequence[int], call: Call | None, does: str = "") -> str:
    """Return a line of a finding."""
    if call is None:
        return f"  {named_ranks(ranks)}{does}: nothing"
    root = "" if call.root is None else f"root {call.root}"
    told = [call.name.strip("_"), *call.dtypes, list(call.counts), call.reduction, root]
    phase = f" ({call.phase})" if call.phase else ""
    return f"  {named_ranks(ranks)}{does}: {' '.join(str(word) for word in told if word)}  {call.site}{phase}"


def _get_terms(call: Call | None) -> Hashable:
    """Return what has to be the same on all ranks."""
    if call is None or call.name in MESSAGES:
        return call and (call.dtypes, call.counts)
    plain, counts = call.name.replace("_", ""), call.counts
    # The pieces of an all-to-all are compared in pairs; only the root of a gather has room for all.
    counts = () if plain.startswith("alltoall") else counts[-1:] if plain.startswith("gather") else counts
    return call.name, call.dtypes, counts, call.reduction, call.root


def _compare(events: Events, groups: Groups, *, begun: bool) -> tuple[list[list[Place]], list[str]]:
    """Return the places of each call, and the first difference of each group or pair. ``begun``: of calls
    that all members have come to."""
    # Group, members, and of messages the way → rank → number → place and call.
    kind = defaultdict[int, dict[int, tuple[Place, Call]]]
    exchanges: defaultdict[tuple[Made, str], kind] = defaultdict(lambda: defaultdict(dict))
    usual: Counter[Hashable] = Counter()  # where two ranks differ, groups of the same kind tell which is odd
    for rank, history in events.items():
        for place, call in enumerate(history):
            if isinstance(call, Call):
                made, way = groups[call.group], ""
                if call.name in MESSAGES and call.root is not None:
                    ends, way = (rank, made.ranks[call.root]), ", of the first to the second"
                    made = Made(made.group, ends if call.name == "send" else ends[::-1], made.about)
                numbered = exchanges[made, way][rank]
                number = len(numbered) if call.number is None else call.number
                numbered[number] = (rank, place), call
                usual[made.about, number, _get_terms(call)] += 1
    together, found = [], []
    for (made, way), ranks in exchanges.items():
        for number in sorted({number for numbered in ranks.values() for number in numbered}):
            here = {rank: ranks[rank][number] for rank in made.ranks if number in ranks[rank]}
            if begun and (way or len(here) < len(made.ranks)):
                continue
            calls = {rank: here[rank][1] if rank in here else None for rank in made.ranks}
            sides = defaultdict(list)
            for rank, told in calls.items():
                sides[_get_terms(told)].append(rank)
            odd = sorted(sides, key=lambda told: (len(sides[told]), usual[made.about, number, told]))
            texts = [_format_side(sides[told], calls[sides[told][0]]) for told in odd]
            texts = texts if len(sides) > 1 else list(_compare_pieces(made.ranks, calls))[:2]
            if texts:
                found.append("\n".join([f"{_describe(made)}{way}: call {number}", *texts]))
                break
            together.append([place for place, _ in here.values()])
    return together, found


def _compare_pieces(members: Sequence[int], calls: Mapping[int, Call | None]) -> Iterator[str]:
    """Yield both sides of pieces of an all-to-all that two ranks take to be of different size."""
    for (i, giver), (j, taker) in permutations(enumerate(members), 2):
        a, b = calls[giver], calls[taker]
        if a and b and a.gives and b.takes and a.gives[j] != b.takes[i]:
            yield _format_side([giver], a, f" gives {a.gives[j]} rows to rank {taker}")
            yield _format_side([taker], b, f" takes {b.takes[i]} rows of rank {giver}")


def _order_calls(rank: int, events: Sequence[Event], streams: str) -> Iterator[tuple[int, Unit, set[Unit]]]:
    """Yield, of each call, its number, the unit, and the units that have to end before that begins."""
    last: dict[Hashable, Unit] = {}
    units: dict[int | None, Unit] = {}
    joined: list[Unit] = []
    for number, event in enumerate(events):
        if isinstance(event, Wait):
            joined = [*last.values()] if event.call is None else [*joined, units[event.call]]
        elif isinstance(event, Call):
            unit = units[number] = rank, number if event.batch is None else f"batch {event.batch}"
            pair = streams == STREAMS[1] and event.name in MESSAGES and event.batch is None
            stream = None if streams == STREAMS[2] else (event.group, event.root if pair else None)
            yield number, unit, {before for before in (*joined, last.get(stream, unit)) if before != unit}
            last[stream] = unit
            joined = [unit] if event.blocks else joined


def _find_circle(
    events: Events, groups: Groups, together: Sequence[Sequence[Place]], streams: str
) -> Iterator[str]:
    """Yield the calls that wait for each other, if there are any."""
    graph: defaultdict[Hashable, set[Hashable]] = defaultdict(set)
    units: dict[Place, Unit] = {}
    first: dict[Unit, Call] = {}
    for rank, history in events.items():
        for number, unit, before in _order_calls(rank, history, streams):
            units[rank, number] = unit
            first.setdefault(unit, history[number])  # type: ignore[arg-type]
            graph["begin", unit] |= {("end", earlier) for earlier in before}
            graph["end", unit].add(("begin", unit))
    for meeting, places in enumerate(together):
        graph["meet", meeting] = {("begin", units[place]) for place in places}
        for place in places:
            graph["end", units[place]].add(("meet", meeting))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        held = sorted({unit for step, unit in error.args[1] if step == "end"}, key=str)
        texts = [
            _format_side(u[:1], first[u], f" waits in {_describe(groups[first[u].group])}") for u in held
        ]
        yield "\n".join([f"ranks wait in a circle, with {streams}", *texts])
