"""Proof that a server has the trainer's weights, and computes the trainer's model with them.

Checksums of all tensors prove the version: one bf16 step of one element shows, where log-probs move by less
than they round. They cannot see elements that changed places, nor what the server computes with its weights.
So both sides also score the same fixed sequences, the canary: a wrong model can answer as fluently as the
right one. (vLLM on a CPU kept the old head of models that tie it to the embedding, and said nothing.)
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_fspo.errors import TrainingError
from megatron_fspo.rollout.checksum import PACKED, Checksum, checksum
from megatron_fspo.rollout.client.answers import BadAnswer
from megatron_fspo.rollout.client.server import Refused, Server, ServerLost
from megatron_fspo.rollout.common import CHECKSUMS

_COUNT, _LENGTH = 4, 24  # of the canary's sequences
_FACTOR = {torch.float32: 8.0, torch.bfloat16: 2.5}
"""Factor by which equal weights may score further apart later than they did at first."""
_FLOOR = {torch.float32: 1e-4, torch.bfloat16: 0.25}
"""Tolerance that every model gets, in nats. bf16 rounds every activation, differently on each side: in sound
runs of SmolLM2-135M by a mean of 0.08 to 0.12 nats (``benchmarks/delta_sync.py``)."""
_CAP = {torch.float32: 1e-2, torch.bfloat16: 0.5}
"""Tolerance that no model gets: two layers that changed places move a canary by more."""
_ANSWER_SECONDS = 600.0
"""Responses that were frozen during the update are served first."""

_SHOWN = 5
_SAME = 1e-13
"""Largest difference of equal sums in float64, over the tensor's size: hundreds of roundings, as the order of
a sum makes some. One bf16 step of an element as large as most shows among 4e10."""
_EPSILON = {"float64": 2**-52, "float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}
"""Rounding of the types that hold values; those of quantised tensors need scales."""

Proof = tuple[bool | None, str]
"""True if the server's tensors are the trainer's, and some lines about that. None: no tensor is known to
differ, but not all are known to agree: the server was not started by ``megatron-fspo serve``, or has them
under other names or quantised."""


class WrongWeights(TrainingError):
    """A server has other weights than the trainer, or computes otherwise with them."""

    def __init__(self, server: str, version: int, how: str) -> None:
        super().__init__(
            f"{server} does not have the trainer's weights after the update to version {version}: {how}"
        )


def with_checksums(
    tensors: Iterable[tuple[str, Tensor]], into: dict[str, Checksum]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors, one at a time in memory; leaves their checksums in ``into``."""
    for name, tensor in tensors:
        into[name] = checksum(tensor)
        yield name, tensor


async def prove_all(
    servers: Sequence[Server], mine: Mapping[str, Checksum], dtypes: dict[str, set[str]]
) -> list[Proof]:
    """:func:`prove` for each, at once."""
    return await asyncio.gather(*(prove(server, mine, dtypes) for server in servers))


async def prove(server: Server, mine: Mapping[str, Checksum], dtypes: dict[str, set[str]]) -> Proof:
    """Compare the server's tensors, all its workers together, with the trainer's; adds to ``dtypes`` those
    that it has each in, by name.

    Raises:
        ServerLost: it did not answer.
    """
    try:
        answer: Any = await server.post("/collective_rpc", {"method": CHECKSUMS}, timeout=600)
        theirs: dict[str, Checksum] = {}
        for worker in answer["results"]:
            for name, words in worker.items():
                piece = Checksum.from_words(words)
                theirs[name] = theirs[name] + piece if name in theirs else piece
    except (ServerLost, Refused, BadAnswer) as error:
        if CHECKSUMS in str(error):  # the one that its worker does not have
            return None, "No checksums of its tensors: `megatron-fspo serve` starts vLLM so that it can tell."
        if isinstance(error, ServerLost):
            raise
        return None, f"No checksums of its tensors: {error}"
    except (KeyError, TypeError, ValueError, AttributeError):
        return None, f"{server.url}/collective_rpc: the answer has no checksums in it"
    for name, one in theirs.items():
        dtypes.setdefault(name.removesuffix(PACKED), set()).add(one.dtype)
    same, text = compare(mine, theirs)
    return same, server.without_key(text)


def compare(mine: Mapping[str, Checksum], theirs: Mapping[str, Checksum]) -> Proof:
    """Compare tensors of the same names; the lines, at most 9, show what differs most."""
    ours = {name: mine[name.removesuffix(PACKED)] for name in theirs if name.removesuffix(PACKED) in mine}
    known = [name for name in ours if theirs[name].dtype in _EPSILON]
    gaps = {name: difference(ours[name], theirs[name]) for name in known}
    wrong = sorted((name for name in known if gaps[name] > 0), key=lambda name: -gaps[name])
    compared = {name.removesuffix(PACKED) for name in known}
    lines = [f"The loaded weights agree ({len(compared)} tensors); what is computed with them differs."]
    if not known:
        lines = ["No tensor has the same name on both sides."]
    elif wrong:
        lines = [f"{len(wrong)} of {len(known)} tensors differ; mean, rms of the trainer's | the server's:"]
    for name in wrong[:_SHOWN]:
        pair = [f"{one.mean:.6g} {one.rms:.6g}" for one in (ours[name], theirs[name])]
        lines.append(f"  {name}: {' | '.join(pair)}")
    if len(wrong) > _SHOWN:
        lines.append(f"  and {len(wrong) - _SHOWN} more")
    types = sorted({(ours[name].dtype, theirs[name].dtype) for name in known})
    if any(here != there for here, there in types):
        lines.append("Types here and there: " + ", ".join(f"{here} and {there}" for here, there in types))
    alone = sorted((mine.keys() | theirs.keys()) - compared - set(known))
    if alone:
        lines.append(f"Not compared, quantised or on one side only: {len(alone)}, such as {alone[0]}")
    all_known = compared == mine.keys() and len(known) == len(ours)
    return (False if wrong else True if all_known else None), "\n".join(lines)


def difference(ours: Checksum, theirs: Checksum) -> float:
    """0 for the same elements, up to their rounding; ∞ where not a number or not as many; else the larger
    difference of mean and rms, over the rms.

    Replicated tensors come once from each worker that holds them.
    """
    copies, rest = divmod(theirs.count, ours.count) if ours.count else (1, theirs.count)
    if rest or not copies:
        return math.inf
    size = max(ours.rms, theirs.rms) or 1.0
    gaps = (abs(ours.mean - theirs.mean) / size, abs(ours.rms - theirs.rms) / size)
    if math.isnan(sum(gaps)):
        return math.inf
    # A server that rounds what it is sent has the same weights.
    same_type = ours.dtype == theirs.dtype
    allowed = _SAME if same_type else max(_EPSILON[ours.dtype], _EPSILON[theirs.dtype])
    return max(gaps) if max(gaps) > allowed else 0.0


def canary_sequences(vocab_size: int, max_length: int) -> list[tuple[int, ...]]:
    """Random token ids, the same in every run of a model."""
    generator = torch.Generator().manual_seed(0)
    shape = (_COUNT, min(_LENGTH, max_length - 1))
    return [tuple(row) for row in torch.randint(vocab_size, shape, generator=generator).tolist()]


async def ask_scores(servers: Sequence[Server], sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Each server's log-probs of all tokens of the sequences but the first of each."""

    async def ask(server: Server) -> Tensor:
        rows = await asyncio.gather(*(server.score(ids, timeout=_ANSWER_SECONDS) for ids in sequences))
        return torch.tensor([log_prob for row in rows for log_prob in row])

    return await asyncio.gather(*(ask(server) for server in servers))


def tolerance(rounding: float, dtype: torch.dtype) -> float:
    """Largest mean |Δ log-prob| of tokens that passes for equal weights of the trainer's dtype, in nats;
    ``rounding`` is the mean on weights known to be equal, 0 if none are."""
    return min(_CAP[dtype], max(_FLOOR[dtype], _FACTOR[dtype] * rounding))
