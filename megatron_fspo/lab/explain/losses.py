"""The losses that are compared, each with limits that can be scaled, and the decisions of one on a dump.

Decisions and weights are those of the losses' own ``objective()``, which a run trains with.

Shapes: N responses, T tokens. Units: S and limits in nats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from megatron_fspo.errors import InputError
from megatron_fspo.lab.explain.dump import Dump
from megatron_fspo.losses import Loss, PolicyLossConfig, loss_sections
from megatron_fspo.objective import ClipBand, effective_sample_size
from megatron_fspo.objective.surrogate import LossInputs

_FIRST = ("fspo", "gspo")
_BLOCK_TOKENS = 1 << 16
BAND_LOSSES: tuple[PolicyLossConfig, ...] = tuple(
    sorted(
        (section() for section in loss_sections() if section.COMPARED and section().limits()),
        key=lambda loss: (*_FIRST, loss.name).index(loss.name),
    )
)
"""The losses with limits, at their defaults. The first is what the others are matched to."""
OUTCOMES = ("kept", "clipped", "in part", "dropped", "no advantage")
"""Fates of a response: in part where tokens have decisions of their own; dropped where its weight is not
finite; without an advantage there is no gradient to clip."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Decisions:
    """The decisions of a loss on each response of a dump; all tensors [N]."""

    outside: Tensor
    """bool: out of band on either side, whatever the sign of A."""
    clipped_low: Tensor
    """1 or 0; where tokens have decisions of their own, the share of its tokens."""
    clipped_high: Tensor
    dual_clipped: Tensor
    dropped: Tensor
    """bool: S, A or the weight is not finite."""
    mass: Tensor
    """Σ_t |weight_t|: the response's part in the batch's gradient, were all ∇log π(y_t) equal in norm."""
    weights: Tensor
    """Importance weights, 0 where a clip acts: [N], or of tokens [T] where they have their own."""
    owner: Tensor
    """The response of each of ``weights``."""

    @property
    def clipped(self) -> Tensor:
        """Share of the response whose gradient a clip removes, on any side."""
        return self.clipped_low + self.clipped_high + self.dual_clipped

    def outcomes(self, advantages: Tensor) -> Tensor:
        """Return [N] index into ``OUTCOMES``."""
        outcomes = torch.where(self.clipped > 0, torch.where(self.clipped < 1 - 1e-9, 2, 1), 0)
        return outcomes.masked_fill(advantages == 0, 4).masked_fill(self.dropped, 3)

    def effective_sample_size(self, responses: Tensor) -> float:
        """Return the ESS of the importance weights of some responses [N] bool; NaN where there are none."""
        chosen = self.weights[responses[self.owner]]
        return effective_sample_size(chosen) if len(chosen) else math.nan


def with_limits(words: Sequence[str]) -> tuple[PolicyLossConfig, ...]:
    """Return the losses with the limits of the command line: ``--fspo.c-high 0.04``.

    Raises:
        InputError: a loss, a key or a value that there is not.
    """
    given: dict[str, dict[str, Any]] = {loss.name: {} for loss in BAND_LOSSES}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, _, key = word.removeprefix("--").partition(".")
        key, _, value = key.partition("=")
        if not word.startswith("--") or not key or name not in given:
            raise InputError(
                f"unexpected argument {word!r}: limits are given as --{BAND_LOSSES[0].name}.c-high 0.04"
            )
        if not value and not rest:
            raise InputError(f"{word} needs a value")
        given[name][key.replace("-", "_")] = value or rest.pop(0)
    return tuple(_checked(loss, given[loss.name]) for loss in BAND_LOSSES)


def _checked(loss: PolicyLossConfig, keys: Mapping[str, Any]) -> PolicyLossConfig:
    about_a_run = {"name", *Loss.model_fields, *loss.RUN_KEYS}
    legal = [name for name in type(loss).model_fields if name not in about_a_run]
    if unknown := [key for key in keys if key not in legal]:
        raise InputError(f"--{loss.name}.{unknown[0]}: no such limit; it has {', '.join(legal)}")
    try:
        return type(loss).model_validate(dict(keys))
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # of several keys together
            raise InputError(f"--{loss.name}: {first['msg'].removeprefix('Value error, ')}") from None
        raise InputError(f"--{loss.name}.{first['loc'][0]} {first['input']}: {first['msg']}") from None


def known_for(dump: Dump, losses: Sequence[PolicyLossConfig]) -> list[PolicyLossConfig]:
    """Return the losses whose decisions follow from the dump: limits on tokens and prefixes need those."""
    return [loss for loss in losses if dump.log_ratio is not None or loss.band() is not None]


def reach(loss: PolicyLossConfig, dump: Dump) -> Tensor:
    """Return [N] the factor by which the band has to be scaled for S to lie on its edge; above 1 outside.

    Where limits hold for every prefix or token, the largest of those.
    """
    if (band := loss.band()) is not None:
        return reach_of_sums(band, dump.log_ratio_sum, dump.lengths.double())
    tokens, segment = dump.log_ratio, torch.arange(len(dump)).repeat_interleave(dump.lengths)
    assert tokens is not None
    if (prefix_band := loss.prefix_band()) is not None:
        prefix, position = _prefix_sums(torch.stack([tokens, torch.ones_like(tokens)]), dump.lengths)
        far = reach_of_sums(prefix_band, prefix, position)
    else:
        far = loss.token_reach(_inputs(dump, slice(0, len(dump)), tokens, dump.old_log_probs, segment))
    return far.new_zeros(len(dump)).scatter_reduce_(0, segment, far, "amax")


def reach_of_sums(band: ClipBand, sums: Tensor, lengths: Tensor) -> Tensor:
    """Return the :func:`reach` from S [N] and L [N], for a band on S."""
    low, high = band.bounds(lengths)
    centre = band.drift * lengths
    off = sums - centre
    return off / torch.where(off < 0, low - centre, high - centre)


def factor_for(far: Tensor, rate: float) -> float:
    """Return the factor on a band's limits that puts this share of the responses, in [0, 1], outside, as near
    as N allows; ``far`` [N] is their :func:`reach`."""
    # Responses with the same reach leave the band together.
    edges, counts = torch.unique(far, return_counts=True)
    outside = len(far) - counts.cumsum(0)  # with a factor just above each
    at = int((outside - rate * len(far)).abs().argmin())
    # Between two responses: on one, rounding would decide.
    above = edges[at + 1] if at + 1 < len(edges) else edges[at] * (1 + 1e-9)
    return float((edges[at] + above) / 2)


def judge(loss: PolicyLossConfig, dump: Dump) -> Decisions:
    """Return the decisions of the loss on the dump."""
    if loss.band() is not None:
        # All tokens of a response have one weight: a row stands for them.
        return _judge(loss, dump, slice(0, len(dump)), dump.log_ratio_sum, None, torch.arange(len(dump)))
    assert dump.log_ratio is not None and dump.old_log_probs is not None
    # Blocks of responses that caches hold: more than twice as fast as all tokens in one tensor.
    ends, blocks, start = dump.lengths.cumsum(0), [], 0
    while start < len(dump):
        before = int(ends[start] - dump.lengths[start])
        stop = max(start + 1, int(torch.searchsorted(ends, before + _BLOCK_TOKENS, right=True)))
        segment = torch.arange(stop - start).repeat_interleave(dump.lengths[start:stop])
        tokens, old = (t[before : int(ends[stop - 1])] for t in (dump.log_ratio, dump.old_log_probs))
        blocks.append(_judge(loss, dump, slice(start, stop), tokens, old, segment))
        start = stop
    columns = {field.name: [getattr(block, field.name) for block in blocks] for field in fields(Decisions)}
    return Decisions(**{name: torch.cat(tensors) for name, tensors in columns.items()})


def _inputs(
    dump: Dump, responses: slice, log_ratio: Tensor, old_log_probs: Tensor | None, segment: Tensor
) -> LossInputs:
    """Return some responses as a micro-batch, on one rank, of a step that is the dump.

    Each has as many of the rows ``log_ratio`` as tokens, or one for all of them, without log-probs.
    """
    lengths = dump.lengths[responses]

    def sequence_sums(values: Tensor) -> Tensor:
        return values.new_zeros(len(values), len(lengths)).index_add_(1, segment, values)

    return LossInputs(
        log_probs=log_ratio if old_log_probs is None else old_log_probs + log_ratio,
        log_ratio=log_ratio,
        loss_mask=torch.ones_like(segment, dtype=torch.bool),
        segment=segment,
        sequence_sums=sequence_sums,
        prefix_sums=partial(_prefix_sums, lengths=lengths),
        lengths=lengths,
        advantages=dump.advantages[responses],
        num_sequences=len(dump),
        num_tokens=int(dump.lengths.sum()),
    )


def _judge(
    loss: PolicyLossConfig,
    dump: Dump,
    responses: slice,
    log_ratio: Tensor,
    old_log_probs: Tensor | None,
    segment: Tensor,
) -> Decisions:
    inputs = _inputs(dump, responses, log_ratio, old_log_probs, segment)
    by_token = loss.band() is None
    terms = loss.objective()(inputs)
    weight, size = terms.weight.abs(), inputs.advantages.abs()[segment]
    return Decisions(
        outside=terms.out_of_band,
        clipped_low=terms.clipped_low,
        clipped_high=terms.clipped_high,
        dual_clipped=terms.dual_clipped,
        dropped=terms.nonfinite,
        mass=inputs.sequence_sums(weight[None])[0] if by_token else weight * inputs.lengths,
        weights=torch.where(size > 0, weight / size, 0.0) if by_token else terms.ratio,
        owner=responses.start + segment,
    )


def _prefix_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Return [k, T] sums over each response up to and with each token."""
    running = values.cumsum(1)
    first = lengths.cumsum(0) - lengths
    before = (running - values)[:, first]
    return running - before.repeat_interleave(lengths, dim=1)
