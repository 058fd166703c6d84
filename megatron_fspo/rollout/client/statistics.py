"""Proof that a server has the version of the weights that was sent: statistics of the tensors on both sides.

One bf16 step of one element shows, where log-probs of the canary move by less than they round. The server's
side is ``server.inside.statistics``. Statistics cannot see elements that changed places, nor what
the server computes with its weights.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from megatron_fspo.rollout.client.answers import BadAnswer
from megatron_fspo.rollout.client.server import Refused, Server, ServerLost
from megatron_fspo.rollout.tensor_stats import PACKED, Stats, tensor_stats

METHOD = "weight_statistics"
NONE = "No statistics of its tensors"
SHOWN = 5
_SAME = 1e-13
"""Of sums in float64, over the tensor's size: hundreds of roundings, as the order of a sum makes some. One
bf16 step of an element as large as most shows among 4e10."""
_EPSILON = {"float64": 2**-52, "float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}
"""Of the types that hold values; those of quantised tensors need scales."""


def counted(tensors: Iterable[tuple[str, Tensor]], into: dict[str, Stats]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, one at a time in memory; leaves their statistics in ``into``."""
    for name, tensor in tensors:
        into[name] = tensor_stats(tensor)
        yield name, tensor


async def prove_all(servers: Sequence[Server], mine: Mapping[str, Stats]) -> list[tuple[bool | None, str]]:
    """:func:`prove` for each, at once."""
    return await asyncio.gather(*(prove(server, mine) for server in servers))


async def prove(server: Server, mine: Mapping[str, Stats]) -> tuple[bool | None, str]:
    """Whether the server's tensors are the trainer's, and some lines about that.

    Returns:
        None where no tensor is known to differ, but not all are known to agree: the server was not started by
        ``megatron-fspo serve``, or has them under other names or quantised.

    Raises:
        ServerLost: it did not answer.
    """
    try:
        theirs = await ask(server)
    except (ServerLost, Refused, BadAnswer) as error:
        if METHOD in str(error):  # the one that its worker does not have
            return None, f"{NONE}: `megatron-fspo serve` starts vLLM so that it can tell them."
        if isinstance(error, ServerLost):
            raise
        return None, f"{NONE}: {error}"
    text = server.without_key(compare(mine, theirs))
    shared = {name: name.removesuffix(PACKED) for name in theirs if name.removesuffix(PACKED) in mine}
    known = {name: ours for name, ours in shared.items() if theirs[name].dtype in _EPSILON}
    if any(difference(mine[ours], theirs[name]) for name, ours in known.items()):
        return False, text
    return (True if mine.keys() <= set(shared.values()) and known == shared else None), text


async def ask(server: Server) -> dict[str, Stats]:
    """Statistics of the server's tensors, all its workers together.

    Raises:
        ServerLost, Refused: as :meth:`Server.post`, also when it was started without the extension.
        BadAnswer: the answer has another form.
    """
    answer = await server.post("/collective_rpc", {"method": METHOD}, timeout=600)
    found: dict[str, Stats] = {}
    try:
        for worker in answer["results"]:  # type: ignore[index]
            for name, words in worker.items():
                piece = Stats.from_words(words)
                found[name] = found[name] + piece if name in found else piece
    except (KeyError, TypeError, ValueError, AttributeError):
        raise BadAnswer(f"{server.url}/collective_rpc: the answer has no statistics in it") from None
    return found


def compare(mine: Mapping[str, Stats], theirs: Mapping[str, Stats]) -> str:
    """What differs most, on at most 9 lines."""
    both = {
        name: stats
        for name, stats in theirs.items()
        if name.removesuffix(PACKED) in mine and stats.dtype in _EPSILON
    }
    gaps = {name: difference(mine[name.removesuffix(PACKED)], stats) for name, stats in both.items()}
    wrong = sorted((name for name in gaps if gaps[name] > 0), key=lambda name: -gaps[name])
    lines = [_summary(both, wrong)]
    for name in wrong[:SHOWN]:
        ours = mine[name.removesuffix(PACKED)]
        lines.append(f"  {name}: {_numbers(ours)} | {_numbers(both[name])}")
    if len(wrong) > SHOWN:
        lines.append(f"  and {len(wrong) - SHOWN} more")
    types = sorted({(mine[name.removesuffix(PACKED)].dtype, stats.dtype) for name, stats in both.items()})
    if any(ours != other for ours, other in types):
        lines.append("Types here and there: " + ", ".join(f"{ours} and {other}" for ours, other in types))
    alone = sorted((mine.keys() | theirs.keys()) - both.keys() - {name.removesuffix(PACKED) for name in both})
    if alone:
        lines.append(f"Not compared, quantised or on one side only: {len(alone)}, such as {alone[0]}")
    return "\n".join(lines)


def _summary(both: Mapping[str, Stats], wrong: list[str]) -> str:
    loaded = [name for name in both if not name.endswith(PACKED) or name.removesuffix(PACKED) not in both]
    agree = f"The loaded weights agree ({len(loaded)} tensors); what is computed with differs:"
    if not both:
        return "No tensor has the same name on both sides."
    if not wrong:
        return (
            f"{agree} a stale packed copy, another dtype or other rotary or attention settings, or elements "
            "that changed places."
        )
    columns = "mean, rms, min, max of the trainer's | the server's:"
    if not set(wrong) & set(loaded):
        return f"{agree} stale packed copies ({len(wrong)}); {columns}"
    return f"{len(wrong)} of {len(both)} tensors differ; {columns}"


def difference(ours: Stats, theirs: Stats) -> float:
    """0 for the same elements, up to their rounding; ∞ where not a number or not as many; else over the size.

    Replicated tensors come once from each worker that holds them.
    """
    copies, rest = divmod(theirs.count, ours.count) if ours.count else (1, theirs.count)
    if rest or not copies:
        return math.inf
    theirs = replace(theirs, count=ours.count, total=theirs.total / copies, squares=theirs.squares / copies)
    if not ours.count:
        return 0.0
    rms = max(ours.rms, theirs.rms) or 1.0
    size = max(abs(ours.low), abs(ours.high), abs(theirs.low), abs(theirs.high)) or 1.0
    gap = max(
        abs(ours.mean - theirs.mean) / rms,
        abs(ours.rms - theirs.rms) / rms,
        abs(ours.low - theirs.low) / size,
        abs(ours.high - theirs.high) / size,
        key=lambda value: math.inf if math.isnan(value) else value,
    )
    if math.isnan(gap):
        return math.inf
    return gap if gap > _allowed(ours.dtype, theirs.dtype) else 0.0


def _allowed(ours: str, theirs: str) -> float:
    """A server that rounds what it is sent has the same weights."""
    if ours == theirs:
        return _SAME
    return max(_EPSILON[ours], _EPSILON[theirs])


def _numbers(stats: Stats) -> str:
    return " ".join(f"{value:.4g}" for value in (stats.mean, stats.rms, stats.low, stats.high))
