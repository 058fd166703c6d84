"""From the measured mismatch to gradient weights, by the rule of the ``correction`` section.

A dropped sequence stays in N with weight 0: the size of a step does not depend on how many were dropped. A
response whose Δ is not finite is not weighted; its old log-probs become NaN, so that the loss drops, counts
and names it as it does everything that is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import assert_never

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.config.correction import (
    CorrectionConfig,
    IcePop,
    LengthFairGate,
    NoCorrection,
    SequenceMask,
    SequenceTIS,
    TokenTIS,
)
from megatron_fspo.objective.correction import length_fair_gate, masked_weight, truncated_weight, within_ratio
from megatron_fspo.objective.fairness import length_bins
from megatron_fspo.packing.batch import MicroBatch, Packs
from megatron_fspo.parallel.groups import ParallelGroups, of_first_rank
from megatron_fspo.trainer.mismatch import Mismatch, per_sample, token_deltas

LEAST_LEFT = 0.5
"""Mean weight and effective sample size below which the user is warned."""


def correct(
    correction: CorrectionConfig, packs: Packs, mismatch: Mismatch, *, groups: ParallelGroups
) -> tuple[Packs, dict[str, float]]:
    """Micro-batches with ``rollout_weights``, and the metrics of the correction. Collective.

    What becomes of a response is decided on the job's first rank. (What becomes of a token is decided on the
    rank that holds it; of tensor-parallel ranks the head takes the first one's word.)

    Args:
        correction: the rule and its limits.
        packs: this rank's, with the old log-probs that ``mismatch`` was measured with.
        mismatch: Δ of all responses.
        groups: of the job's layout.

    Returns:
        the metrics of :func:`correction_metrics`; none without a correction.
    """
    if isinstance(correction, NoCorrection):
        return packs, {}
    everyone = (groups.dp_cp, groups.tp, groups.pp)
    mismatch = replace(mismatch, sums=of_first_rank(mismatch.sums, *everyone))
    if isinstance(correction, TokenTIS | IcePop):
        columns = _token_columns(correction, packs, mismatch, groups.dp_cp)

        def weights(batch: MicroBatch) -> Tensor:
            return token_weights(correction, token_deltas(batch))[0]

    else:
        decisions = torch.stack(sequence_weights(correction, mismatch.sums, mismatch.lengths))
        weight, acted = of_first_rank(decisions, *everyone)
        columns = torch.stack([acted, weight, weight.square(), torch.ones_like(weight)])

        def weights(batch: MicroBatch) -> Tensor:
            return _per_token(weight[batch.sample_index], batch)

    corrected = [_with_weights(batch, weights(batch), mismatch.sums) for batch in packs]
    act = "truncated" if isinstance(correction, TokenTIS | SequenceTIS) else "dropped"
    units = {"token_tis": "_tokens", "icepop": "_tokens", "sequence_tis": "_sequences"}
    metrics = correction_metrics(act + units.get(correction.name, ""), columns, mismatch)
    old, weighted = ([pair[i] for pair in corrected] for i in range(2))
    return packs.with_columns(old_log_probs=old, rollout_weights=weighted), metrics


def token_weights(correction: TokenTIS | IcePop, deltas: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [t] of each token; and [t] bool where the rule acted (dropped it, or truncated its weight)."""
    match correction:
        case TokenTIS(cap=cap):
            return truncated_weight(deltas, cap), deltas > math.log(cap)
        case IcePop(low=low, high=high):
            return masked_weight(deltas, low, high), ~within_ratio(deltas, low, high)
        case _:
            assert_never(correction)


def sequence_weights(
    correction: SequenceTIS | SequenceMask | LengthFairGate, sums: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Weight [N] of each sequence; and [N] 1 where the rule acted (dropped it, or truncated its weight)."""
    match correction:
        case SequenceTIS(cap=cap):
            return truncated_weight(sums, cap), (sums > math.log(cap)).to(sums)
        case SequenceMask(low=low, high=high):
            kept = within_ratio(sums, low, high)
        case LengthFairGate(c=c):
            kept = length_fair_gate(sums, lengths, c)
        case _:
            assert_never(correction)
    return kept.to(sums), (~kept).to(sums)


def correction_metrics(name: str, columns: Tensor, mismatch: Mismatch) -> dict[str, float]:
    """Measure what the rule did, over all responses whose Δ is finite.

    Args:
        name: what it does to a unit (a sequence, or a token for ``token_tis``).
        columns: [4, samples] of each response: units acted on; Σ w and Σ w² of their weights; units.
        mismatch: Δ of all responses.

    Returns:
        ``rollout/correction_<name>``, the share of units, also ``/short`` and ``/long``, in the shorter and
        the longer half of the responses (equal lengths share a half; NaN where there is none);
        ``rollout/correction_weight_mean`` and ``rollout/correction_ess`` (:func:`effective_share`),
        over units.
    """
    counted = mismatch.sums.isfinite() & (mismatch.lengths > 0)
    acted, weight, square, units = columns[:, counted]
    half = length_bins(mismatch.lengths[counted], 2)

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
    """Effective sample size of weighted units, as a share of them: (Σ w)² / (N Σ w²), Kish's formula.

    1 where all weights are equal, however small; 1/N where one unit has all the weight.

    Args:
        weight: scalar Σ w, over all ranks.
        square: scalar Σ w², over all ranks.
        units: scalar N, over all ranks.

    Returns:
        0 where all weights are 0; NaN without units.
    """
    if units > 0 and square == 0:
        return 0.0
    return (weight.square() / (units * square)).item()


def little_is_left(correction: CorrectionConfig, metrics: Mapping[str, float]) -> str | None:
    """Return a warning, with the remedy, where the rule leaves less than half of a batch to learn from.

    Args:
        correction: the rule and its limits.
        metrics: of :func:`correct` and of the mismatch it corrected; the same on every rank.
    """
    if isinstance(correction, NoCorrection):
        return None
    mean, ess = metrics["rollout/correction_weight_mean"], metrics["rollout/correction_ess"]
    if not (mean < LEAST_LEFT or ess < LEAST_LEFT):
        return None
    unit = "tokens" if isinstance(correction, TokenTIS | IcePop) else "responses"
    sigma = metrics["rollout/mismatch_sigma"]
    gate = f"correction.c = {4 * sigma:.2g}, four times that sigma"
    match correction:
        case SequenceTIS() | SequenceMask():
            remedy = (
                "Noise that grows as the root of the length costs long responses the most: "
                f"correction.name = length_fair_gate ({gate}) and token_tis treat every length alike"
            )
        case LengthFairGate():
            remedy = f"Noise alone passes with {gate}"
        case TokenTIS() | IcePop():
            remedy = "No noise does this to single tokens: the weights or log-probs of the sampler are others"
        case _:
            assert_never(correction)
    return (
        f"correction.name = {correction.name} leaves {unit} a mean weight of {mean:.2g}, and an effective "
        f"sample size of {ess:.0%} of their number (rollout/mismatch_sigma {sigma:.2g}, "
        f"rollout/mismatch_outliers {metrics['rollout/mismatch_outliers']:.1%}). {remedy}"
    )


def _token_columns(
    correction: TokenTIS | IcePop, packs: Packs, mismatch: Mismatch, group: dist.ProcessGroup
) -> Tensor:
    """The columns of :func:`correction_metrics` for a rule about tokens. Collective."""

    def rows(batch: MicroBatch) -> Tensor:
        weight, acted = token_weights(correction, token_deltas(batch))
        return torch.stack([acted.double(), weight, weight.square()])

    totals = per_sample(packs, rows, 3, len(mismatch.lengths), group=group)
    return torch.cat([totals, mismatch.lengths.double()[None]])


def _with_weights(batch: MicroBatch, weights: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Old log-probs [t], NaN for a response whose Δ is not finite; and weights [t]."""
    assert batch.old_log_probs is not None
    old = batch.old_log_probs
    broken = _per_token(~sums[batch.sample_index].isfinite(), batch)
    return torch.where(broken, math.nan, old), torch.where(batch.mask, weights, 0.0).to(old.dtype)


def _per_token(values: Tensor, batch: MicroBatch) -> Tensor:
    """[n] → [t]; 0 (or False) for tokens that belong to nobody."""
    return torch.cat([values, values.new_zeros(1)]).index_select(0, batch.segment)
