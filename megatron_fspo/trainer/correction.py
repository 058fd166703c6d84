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
from torch import Tensor

from megatron_fspo.config.correction import IcePop, LengthFairGate, SequenceMask, SequenceTIS, TokenTIS
from megatron_fspo.objective.correction import length_fair_gate, masked_weight, truncated_weight, within_ratio
from megatron_fspo.objective.fairness import length_bins
from megatron_fspo.packing.batch import MicroBatch, Packs
from megatron_fspo.parallel.groups import ParallelGroups, of_first_rank
from megatron_fspo.trainer.mismatch import Mismatch, per_sample, token_deltas

Rule = TokenTIS | IcePop | SequenceTIS | SequenceMask | LengthFairGate
LEAST_LEFT = 0.5
"""Mean weight and effective sample size below which the user is warned."""


def correct(
    correction: Rule, packs: Packs, mismatch: Mismatch, *, groups: ParallelGroups
) -> tuple[Packs, dict[str, float]]:
    """Micro-batches with ``rollout_weights``, and the metrics of the correction. Collective.

    What becomes of a response is decided on the job's first rank. (What becomes of a token is decided on the
    rank that holds it; of tensor-parallel ranks the head takes the first one's word.)

    ``packs`` are this rank's, with the old log-probs that ``mismatch`` was measured with. The metrics are
    those of :func:`correction_metrics`.
    """
    everyone = (groups.dp_cp, groups.tp, groups.pp)
    mismatch = replace(mismatch, sums=of_first_rank(mismatch.sums, *everyone))
    if isinstance(correction, TokenTIS | IcePop):

        def rows(batch: MicroBatch) -> Tensor:
            weight, acted = weights_of(correction, token_deltas(batch), batch.lengths)
            return torch.stack([acted.double(), weight, weight.square()])

        totals = per_sample(packs, rows, 3, len(mismatch.lengths), group=groups.dp_cp)
        columns = torch.cat([totals, mismatch.lengths.double()[None]])

        def weights(batch: MicroBatch) -> Tensor:
            return weights_of(correction, token_deltas(batch), batch.lengths)[0]

    else:
        weight, acted = weights_of(correction, mismatch.sums, mismatch.lengths)
        weight, acted = of_first_rank(torch.stack([weight, acted.to(weight)]), *everyone)
        columns = torch.stack([acted, weight, weight.square(), torch.ones_like(weight)])

        def weights(batch: MicroBatch) -> Tensor:
            return _per_token(weight[batch.sample_index], batch)

    old, weighted = [], []
    for batch in packs:
        assert batch.old_log_probs is not None
        broken = _per_token(~mismatch.sums[batch.sample_index].isfinite(), batch)
        old.append(torch.where(broken, math.nan, batch.old_log_probs))
        weighted.append(torch.where(batch.mask, weights(batch), 0.0).to(batch.old_log_probs.dtype))
    act = "truncated" if isinstance(correction, TokenTIS | SequenceTIS) else "dropped"
    units = {"token_tis": "_tokens", "icepop": "_tokens", "sequence_tis": "_sequences"}
    metrics = correction_metrics(act + units.get(correction.name, ""), columns, mismatch)
    return packs.with_columns(old_log_probs=old, rollout_weights=weighted), metrics


def weights_of(correction: Rule, deltas: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Weight of each unit, a token or a sequence; and bool where the rule acted: dropped it, or truncated its
    weight. ``deltas`` are Δ [units], over a whole sequence where the rule is about sequences, with the
    ``lengths`` [units] of these."""
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
    """Effective sample size of weighted units, as a share of them: (Σ w)² / (N Σ w²), Kish's formula.

    1 where all weights are equal, however small; 1/N where one unit has all the weight; 0 where all weights
    are 0; NaN without units. Σ w, Σ w² and N are scalars, over all ranks.
    """
    if units > 0 and square == 0:
        return 0.0
    return (weight.square() / (units * square)).item()


def little_is_left(correction: Rule, metrics: Mapping[str, float]) -> str | None:
    """Return a warning, with the remedy, where the rule leaves less than half of a batch to learn from.

    ``metrics`` are those of :func:`correct` and of the mismatch it corrected; the same on every rank.
    """
    mean, ess = metrics["rollout/correction_weight_mean"], metrics["rollout/correction_ess"]
    if not (mean < LEAST_LEFT or ess < LEAST_LEFT):
        return None
    unit = "responses"
    sigma = metrics["rollout/mismatch_sigma"]
    gate = f"correction.c = {4 * sigma:.2g}, four times that sigma"
    if isinstance(correction, TokenTIS | IcePop):
        unit = "tokens"
        remedy = "No noise does this to single tokens: the weights or log-probs of the sampler are others"
    elif isinstance(correction, LengthFairGate):
        remedy = f"Noise alone passes with {gate}"
    else:
        remedy = (
            "Noise that grows as the root of the length costs long responses the most: "
            f"correction.name = length_fair_gate ({gate}) and token_tis treat every length alike"
        )
    return (
        f"correction.name = {correction.name} leaves {unit} a mean weight of {mean:.2g}, and an effective "
        f"sample size of {ess:.0%} of their number (rollout/mismatch_sigma {sigma:.2g}, "
        f"rollout/mismatch_outliers {metrics['rollout/mismatch_outliers']:.1%}). {remedy}"
    )


def _per_token(values: Tensor, batch: MicroBatch) -> Tensor:
    """[n] → [t]; 0 (or False) for tokens that belong to nobody."""
    return torch.cat([values, values.new_zeros(1)]).index_select(0, batch.segment)
