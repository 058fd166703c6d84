"""Bytes of parameters, gradients, optimizer and checkpoint: exact, as Megatron lays them out.

With a distributed optimizer the values of a model chunk lie in one buffer, which data (and context) parallel
ranks share out in equal parts. Its padding is that of ``_ParamAndGradBuffer`` in megatron-core
(``distributed/param_and_grad_buffer.py``): parameters begin at multiples of 64 values, and a bucket, of which
each rank has an equal part, at a multiple of 128 and of the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_fspo.lab.plan.shape import Parameter, Shape, stage_parameters
from megatron_fspo.weights.table import whole_model

_GRADIENT = 4  # fp32, summed in fp32
_MOMENTS = 8  # two of Adam's, in fp32
_MASTER = 4  # the fp32 copy, where parameters are rounded


@dataclass(frozen=True, kw_only=True)
class State:
    """What a rank holds all the time."""

    parameters: int
    gradients: int
    optimizer: int
    """Adam's moments and, in bf16, fp32 masters; a counter per parameter, 4 bytes, is left out."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """Parameters whose gradients are reduced together."""

    size: int
    """Values, padding included."""
    places: tuple[tuple[int, int], ...]
    """First and end of each parameter."""
    buckets: tuple[tuple[int, int], ...]
    ranks: int
    """That share it out."""

    def held(self, rank: int) -> int:
        """Values, without padding, that are a rank's under a distributed optimizer."""
        found = 0
        for start, end in self.buckets:
            part = (end - start) // self.ranks
            mine = (start + rank * part, start + (rank + 1) * part)
            found += sum(max(0, min(end, mine[1]) - max(first, mine[0])) for first, end in self.places)
        return found


def state(shape: Shape, stage: int, rank: int = 0) -> State:
    """Of a rank of the stage.

    Args:
        rank: among the ranks that share the optimizer's state out; the first holds as much as any but for
            padding.
    """
    parameters = gradients = held = 0
    spread = shape.parallel.distributed_optimizer
    for number, chunk in enumerate(stage_parameters(shape, stage)):
        for buffer in buffers(shape, stage, number, chunk):
            parameters += buffer.size * shape.width
            gradients += buffer.size * _GRADIENT
            held += buffer.held(rank % buffer.ranks) if spread else buffer.size
    return State(parameters=parameters, gradients=gradients, optimizer=held * _optimizer_width(shape))


def buffers(shape: Shape, stage: int, number: int, chunk: Sequence[Parameter]) -> Iterator[Buffer]:
    """Of a model chunk: one of what all tensor-parallel ranks share, and one of its experts."""
    bucket = None
    if shape.parallel.overlap_grad_reduce and stage == 0 and number == 0:
        bucket = max(40_000_000, 1_000_000 * shape.data)  # Megatron's default
    for expert, ranks in ((False, shape.reduced_over), (True, shape.experts_reduced_over)):
        if some := [parameter for parameter in chunk if parameter.expert is expert]:
            yield _buffer(some, ranks, bucket, padded=shape.parallel.distributed_optimizer)


def _buffer(parameters: Sequence[Parameter], ranks: int, bucket: int | None, *, padded: bool) -> Buffer:
    """Last parameters first, about as backward comes to them."""
    step, align = (math.lcm(ranks, 128), 64) if padded else (1, 1)
    places: list[tuple[int, int]] = []
    buckets: list[tuple[int, int]] = []
    begin = at = 0
    fresh = True  # whether the bucket is empty

    def close() -> None:
        nonlocal begin, at, fresh
        at += -at % step
        buckets.append((begin, at))
        begin, fresh = at, True

    for parameter in reversed(parameters):
        at += -at % align
        # So that both stages of a tied embedding cut it at the same values.
        alone = parameter.shared and padded
        if alone and not fresh:
            close()
        places.append((at, at + parameter.count))
        at, fresh = at + parameter.count, False
        if alone or (bucket is not None and at - begin >= bucket):
            close()
    if not fresh:
        close()
    return Buffer(size=at, places=tuple(places), buckets=tuple(buckets), ranks=ranks)


def _optimizer_width(shape: Shape) -> int:
    return _MOMENTS + (_MASTER if shape.width < 4 else 0)


def checkpoint_bytes(shape: Shape) -> int:
    """Tensors of a checkpoint to resume from: weights, moments and, in bf16, masters, without copies.

    Beside them lies an index.
    """
    return _values(shape, padded=True) * (shape.width + _optimizer_width(shape))


def export_bytes(shape: Shape) -> int:
    """Tensors of the Hugging Face checkpoint."""
    return _values(shape, padded=False) * shape.width


def _values(shape: Shape, *, padded: bool) -> int:
    arch = shape.arch
    return sum(
        (shape.padded_vocab * arch.hidden_size if padded and row.layout == "vocab" else 0)
        or sum(math.prod(tensor.shape(arch)) for tensor in row.hf)
        for row, _, _ in whole_model(arch)
    )
