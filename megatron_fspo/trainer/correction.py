"""Gradient weights from the measured mismatch, by the rule in the configuration's ``correction`` section.

A dropped sequence keeps its place in N with weight 0, so the size of a step does not depend on the number of
dropped sequences. The old log-probs of a response with a non-finite Δ become NaN, so that the loss drops,
counts and names it like other non-finite ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import assert_never

import torch
from torch import Tensor

from megatron_fspo.config.correction import IcePop, LengthFairGate, SequenceMask, SequenceTIS, TokenTIS
from megatron_fspo.objective.correction import length_fair_gate, masked_weight, truncated_weight, within_ratio
from megatron_fspo.objective.fairness import length_bins
from megatron_fspo.packing.batch import MicroBatch, MicroBatches
from megatron_fspo.parallel.groups import ParallelGroups, broadcast_first
from megatron_fspo.trainer.mismatch import Mismatch, per_sample, token_deltas

Rule = TokenTIS | IcePop | SequenceTIS | SequenceMask | LengthFairGate
LEAST_LEFT = 0.5
"""Warn if the mean weight or the effective sample size (as a share) is below this."""


def correct(
    correction: Rule, micro_batches: MicroBatches, mismatch: Mismatch, *, groups: ParallelGroups
) -> tuple[MicroBatches, dict[str, float]]:
    """Return the micro-batches with ``rollout_weights``, and the :func:`correction_metrics`. Collective.

    The sums of the job's first rank decide about responses. Weights of tokens are computed on the ranks that
    hold the tokens; the head uses those of the first tensor-parallel rank.

    ``micro_batches`` are this rank's, with the old log-probs with which ``mismatch`` was measured.
    """
    sums = broadcast_first(mismatch.sums, groups.dp_cp, groups.tp, groups.pp)
    mismatch = replace(mismatch, sums=sums)
    if isinstance(correction, TokenTIS | IcePop):

        def rows(batch: MicroBatch) -> Tensor:
            weight, acted = compute_weights(correction, token_deltas(batch), batch.lengths)
            return torch.stack([acted.double(), weight, weight.square()])

        totals = per_sample(micro_batches, rows, 3, len(mismatch.lengths), group=groups.dp_cp)
        columns = torch.cat([totals, mismatch.lengths.double()[None]])

        def weights(batch: MicroBatch) -> Tensor:
            return compute_weights(correction, token_deltas(batch), batch.lengths)[0]

    else:
        weight, acted = compute_weights(correction, mismatch.sums, mismatch.lengths)
        columns = torch.stack([acted.to(weight), weight, weight.square(), torch.ones_like(weight)])

        def weights(batch: MicroBatch) -> Tensor:
            return _per_token(weight[batch.sample_index], batch)

    old, weighted = [], []
    for batch in micro_batches:
        assert batch.old_log_probs is not None
        broken = _per_token(~mismatch.sums[batch.sample_index].isfinite(), batch)
        old.append(torch.where(broken, math.nan, batch.old_log_probs))
        weighted.append(torch.where(batch.loss_mask, weights(batch), 0.0).to(batch.old_log_probs.dtype))
    act = "truncated" if isinstance(correction, TokenTIS | SequenceTIS) else "dropped"
    units = {"token_tis": "_tokens", "icepop": "_tokens", "sequence_tis": "_sequences"}
    metrics = correction_metrics(act + units.get(correction.name, ""), columns, mismatch)
    return micro_batches.with_columns(old_log_probs=old, rollout_weights=weighted), metrics


def compute_weights(correction: Rule, deltas: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of units (tokens or sequences, by rule), and bools: True where the rule dropped a
    unit or truncated its weight. ``deltas`` [units] are Δ of tokens or its sums over sequences; ``lengths``
    are those of the sequences."""
    match correction:
        case TokenTIS(cap=cap) | SequenceTIS(cap=cap):
            return truncated_weight(deltas, cap), deltas > math.log(cap)
        case IcePop(low=low, high=high):
            return masked_weight(deltas, low, high), ~within_ratio(deltas, low, high)
        case SequenceMask(low=low, high=high):
            kept = within_ratio(deltas, low, high)
        case LengthFairGate(c=c):
            kept = length_fair_gate(deltas, lengths, c)
        case _:
            assert_never(correction)
    return kept.to(deltas), ~kept


def correction_metrics(name: str, columns: Tensor, mismatch: Mismatch) -> dict[str, float]:
    """Return the metrics of a correction, over all responses with a finite Δ.

    Args:
        name: effect of the rule, such as ``dropped`` or ``truncated_tokens``, for the metric's name.
        columns: [4, samples] for each response: units dropped or truncated; Σ w and Σ w²; number of units.
        mismatch: Δ of all responses.

    Returns:
        ``rollout/correction_<name>``, the share of units dropped or truncated, and its ``/short`` and
        ``/long``, for the shorter and the longer half of the responses (equal lengths share a half; NaN for
        an empty half); ``rollout/correction_weight_mean`` and ``rollout/correction_ess``
        (:func:`effective_share`), over units.
    """
    columns, sums, lengths = columns.cpu(), mismatch.sums.cpu(), mismatch.lengths.cpu()
    counted = sums.isfinite() & (lengths > 0)
    acted, weight, square, units = columns[:, counted]
    half = length_bins(lengths[counted], 2)

    def share(chosen: Tensor) -> float:
        return float(acted[chosen].sum() / units[chosen].sum())

    return {
        f"rollout/correction_{name}": share(half >= 0),
        f"rollout/correction_{name}/short": share(half == 0),
        f"rollout/correction_{name}/long": share(half == 1),
        "rollout/correction_weight_mean": (weight.sum() / units.sum()).item(),
        "rollout/correction_ess": effective_share(weight.sum(), square.sum(), units.sum()),
    }


def effective_share(weight: Tensor, square: Tensor, units: Tensor) -> float:
    """Return the effective sample size as a share of N: (Σ w)² / (N Σ w²), Kish's formula; 0 if all weights
    are 0, NaN without units. ``weight``, ``square`` and ``units`` are Σ w, Σ w² and N over all ranks."""
    if units > 0 and square == 0:
        return 0.0
    return (weight.square() / (units * square)).item()


def little_is_left(correction: Rule, metrics: Mapping[str, float]) -> str | None:
    """Return a warning with a remedy if mean weight or effective sample size is below :data:`LEAST_LEFT`;
    otherwise None. ``metrics`` are those of :func:`correct` and of the mismatch."""
    mean, ess = metrics["rollout/correction_weight_mean"], metrics["rollout/correction_ess"]
    if not (mean < LEAST_LEFT or ess < LEAST_LEFT):
        return None
    unit = "responses"
    sigma = metrics["rollout/mismatch_sigma"]
    gate = f"correction.c = {4 * sigma:.2g}, four times that sigma"
    if isinstance(correction, TokenTIS | IcePop):
        unit = "tokens"
        remedy = "Noise does not do this to single tokens: the sampler's weights or log-probs are wrong"
    elif isinstance(correction, LengthFairGate):
        remedy = f"To accept responses that differ by noise alone, set {gate}"
    else:
        remedy = (
            "Noise grows as the root of the length and so affects long responses most: "
            f"correction.name = length_fair_gate ({gate}) and token_tis treat all lengths alike"
        )
    return (
        f"correction.name = {correction.name} gives {unit} a mean weight of {mean:.2g} and an effective "
        f"sample size of {ess:.0%} of their number (rollout/mismatch_sigma {sigma:.2g}, "
        f"rollout/mismatch_outliers {metrics['rollout/mismatch_outliers']:.1%}). {remedy}"
    )


def _per_token(values: Tensor, batch: MicroBatch) -> Tensor:
    """Expand values [n] of sequences to tokens [t]; 0 (or False) for tokens outside any sequence."""
    return torch.cat([values, values.new_zeros(1)]).index_select(0, batch.segment)
