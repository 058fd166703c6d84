"""Proves that a server has the trainer's weights and computes the same model with them.

Checksums of all tensors prove the version. They detect one bf16 step of one element, which changes log-probs
by less than their rounding. They detect neither permuted elements nor wrong computation, so both sides also
score fixed sequences, the canary. A wrong model can answer as fluently as the right one: vLLM on a CPU
silently kept the old head of models with tied embeddings.
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

_COUNT, _LENGTH = 4, 24  # number and length of the canary's sequences
_FACTOR = {torch.float32: 8.0, torch.bfloat16: 2.5}
"""Ratio of the tolerance to the mean difference that equal weights have at first."""
_FLOOR = {torch.float32: 1e-4, torch.bfloat16: 0.25}
"""Smallest tolerance, in nats. bf16 rounds activations differently on each side, by 0.08 to 0.12 nats on
average in correct runs of SmolLM2-135M (``benchmarks/delta_sync.py``)."""
_CAP = {torch.float32: 1e-2, torch.bfloat16: 0.5}
"""Largest tolerance, in nats. Swapping two layers changes the canary by more."""
_ANSWER_SECONDS = 600.0
"""Time limit of a canary request. Responses that the update froze are served first."""

_SHOWN = 5
_SAME = 1e-13
"""Largest difference of mean or rms, relative to the rms, of equal tensors of one dtype: hundreds of float64
roundings, for different orders of summation. A bf16 step of a typical element shows among 4e10 elements."""
_EPSILON = {"float64": 2**-52, "float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}
"""Relative rounding of dtypes that can be compared. Quantised dtypes cannot, as they need scales."""

Proof = tuple[bool | None, str]
"""(verdict, lines of text about it). True: the server's tensors are the trainer's. False: some differ. None:
none is known to differ but some could not be compared, as the server was not started by
``megatron-fspo serve``, or has them quantised or under other names."""


class WrongWeights(TrainingError):
    """A server has other weights than the trainer, or computes another model with them."""

    def __init__(self, server: str, version: int, how: str) -> None:
        super().__init__(
            f"{server} does not have the trainer's weights after the update to version {version}: {how}"
        )


def with_checksums(
    tensors: Iterable[tuple[str, Tensor]], into: dict[str, Checksum]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors, holding one at a time, and store their checksums in ``into``."""
    for name, tensor in tensors:
        into[name] = checksum(tensor)
        yield name, tensor


async def prove_all(
    servers: Sequence[Server], mine: Mapping[str, Checksum], dtypes: dict[str, set[str]]
) -> list[Proof]:
    """Run :func:`prove` for all servers concurrently."""
    return await asyncio.gather(*(prove(server, mine, dtypes) for server in servers))


async def prove(server: Server, mine: Mapping[str, Checksum], dtypes: dict[str, set[str]]) -> Proof:
    """Compare a server's tensors, added over its workers, with the trainer's. Add the server's dtypes of each
    tensor to ``dtypes``, by name. Raises ``ServerLost`` if the server does not answer."""
    try:
        answer: Any = await server.post("/collective_rpc", {"method": CHECKSUMS}, timeout=600)
        theirs: dict[str, Checksum] = {}
        for worker in answer["results"]:
            for name, words in worker.items():
                piece = Checksum.from_words(words)
                theirs[name] = theirs[name] + piece if name in theirs else piece
    except (ServerLost, Refused, BadAnswer) as error:
        if CHECKSUMS in str(error):  # the worker does not have this method
            return None, "The server returns no checksums: start it with `megatron-fspo serve`."
        if isinstance(error, ServerLost):
            raise
        return None, f"The server returns no checksums: {error}"
    except (KeyError, TypeError, ValueError, AttributeError):
        return None, f"{server.url}/collective_rpc: the answer has no checksums in it"
    for name, value in theirs.items():
        dtypes.setdefault(name.removesuffix(PACKED), set()).add(value.dtype)
    same, text = compare(mine, theirs)
    return same, server.without_key(text)


def compare(mine: Mapping[str, Checksum], theirs: Mapping[str, Checksum]) -> Proof:
    """Compare tensors of the same names. The text, at most 9 lines, shows the largest differences."""
    ours = {name: mine[name.removesuffix(PACKED)] for name in theirs if name.removesuffix(PACKED) in mine}
    known = [name for name in ours if theirs[name].dtype in _EPSILON]
    gaps = {name: difference(ours[name], theirs[name]) for name in known}
    wrong = sorted((name for name in known if gaps[name] > 0), key=lambda name: -gaps[name])
    compared = {name.removesuffix(PACKED) for name in known}
    lines = [f"The loaded weights agree ({len(compared)} tensors); the results computed with them differ."]
    if not known:
        lines = ["No tensor has the same name on both sides."]
    elif wrong:
        lines = [f"{len(wrong)} of {len(known)} tensors differ; mean and rms of trainer | server:"]
    for name in wrong[:_SHOWN]:
        pair = [f"{value.mean:.6g} {value.rms:.6g}" for value in (ours[name], theirs[name])]
        lines.append(f"  {name}: {' | '.join(pair)}")
    if len(wrong) > _SHOWN:
        lines.append(f"  and {len(wrong) - _SHOWN} more")
    types = sorted({(ours[name].dtype, theirs[name].dtype) for name in known})
    if any(here != there for here, there in types):
        lines.append("Trainer/server dtypes: " + ", ".join(f"{here} and {there}" for here, there in types))
    alone = sorted((mine.keys() | theirs.keys()) - compared - set(known))
    if alone:
        lines.append(f"Not compared (quantised, or on one side only): {len(alone)}, such as {alone[0]}")
    all_known = compared == mine.keys() and len(known) == len(ours)
    return (False if wrong else True if all_known else None), "\n".join(lines)


def difference(ours: Checksum, theirs: Checksum) -> float:
    """Return 0 if the elements are equal up to rounding, ∞ for NaN or different numbers of elements, else the
    larger difference of mean and rms, divided by the rms. Replicated tensors may count once per worker in
    ``theirs``."""
    copies, rest = divmod(theirs.count, ours.count) if ours.count else (1, theirs.count)
    if rest or not copies:
        return math.inf
    size = max(ours.rms, theirs.rms) or 1.0
    gaps = (abs(ours.mean - theirs.mean) / size, abs(ours.rms - theirs.rms) / size)
    if math.isnan(sum(gaps)):
        return math.inf
    # A server may round the weights to its dtype.
    same_type = ours.dtype == theirs.dtype
    allowed = _SAME if same_type else max(_EPSILON[ours.dtype], _EPSILON[theirs.dtype])
    return max(gaps) if max(gaps) > allowed else 0.0


def canary_sequences(vocab_size: int, max_length: int) -> list[tuple[int, ...]]:
    """Return random token ids, the same in every run of a model."""
    generator = torch.Generator().manual_seed(0)
    shape = (_COUNT, min(_LENGTH, max_length - 1))
    return [tuple(row) for row in torch.randint(vocab_size, shape, generator=generator).tolist()]


async def ask_scores(servers: Sequence[Server], sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return each server's log-probs of all tokens but the first of each sequence."""

    async def ask(server: Server) -> Tensor:
        rows = await asyncio.gather(*(server.score(ids, timeout=_ANSWER_SECONDS) for ids in sequences))
        return torch.tensor([log_prob for row in rows for log_prob in row])

    return await asyncio.gather(*(ask(server) for server in servers))


def tolerance(rounding: float, dtype: torch.dtype) -> float:
    """Return the largest mean |Δ log-prob| of tokens, in nats, that is accepted for equal weights. ``dtype``
    is the trainer's; ``rounding`` is the mean with weights known to be equal, 0 if none are."""
    return min(_CAP[dtype], max(_FLOOR[dtype], _FACTOR[dtype] * rounding))
