"""Losses by sequence and by token behind one interface: per-token weights.

Every loss here has the gradient Σ_t weight_t ∇ log π(y_t) with weights that need no gradient themselves, so
a trainer minimises ``-Σ_t weight_t · logp_t / N`` and no gradient has to cross the reductions that made S.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from megatron_fspo.objective.band import ClipBand, DualClip
from megatron_fspo.objective.surrogate import Surrogate, sequence_surrogate

Aggregation = Literal["sequence-mean", "token-mean"]


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """n sequences in t tokens of one micro-batch (of this rank, where a sequence lies on several)."""

    log_probs: Tensor
    """[t] log π_new; anything outside the mask."""
    log_ratio: Tensor
    """[t] log π_new - log π_old; anything outside the mask."""
    mask: Tensor
    """[t] bool: response tokens."""
    segment: Tensor
    """[t] sequence of each token, in [0, n]; n belongs to nobody."""
    sequence_sums: Callable[[Tensor], Tensor]
    """[k, t] → [k, n]: masked sums over each whole response, over all ranks that share it, detached.

    One collective where sequences lie on several ranks, so a loss calls it once. The same bits on each.
    """
    prefix_sums: Callable[[Tensor], Tensor]
    """[k, t] → [k, t]: masked sums over the response up to and with each token, as ``sequence_sums`` over all
    ranks that share it; anything outside the mask. Also one collective."""
    decided: Callable[[Tensor], Tensor] = lambda values: values
    """[k, n] → [k, n]: one rank's decisions about the sequences, on all ranks that share them.

    Also a collective there, called once. Without such ranks, the decisions themselves.
    """
    lengths: Tensor
    """[n] response lengths L."""
    advantages: Tensor
    """[n]."""
    num_sequences: int
    """N of the whole optimizer step."""
    num_tokens: int
    """T of the whole optimizer step."""


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """The weights of one micro-batch, and the decisions that they come from."""

    log_ratio_sum: Tensor
    """[n] S: the sum of the log-ratios over the whole response, in nats."""
    weight: Tensor
    """[t] N · dJ / dlogp_t, 0 outside the mask and where clipped."""
    ratio: Tensor
    """[n] the importance weight in the sequence's gradient, 0 where a clip acts; NaN where tokens have their
    own."""
    objective: Tensor
    """[] Σ over this micro-batch such that J = Σ over all micro-batches and ranks / N."""
    clipped_low: Tensor
    """[n] 1 where the lower edge clipped the sequence (token level: share of its tokens)."""
    clipped_high: Tensor
    """[n] the same for the upper edge."""
    dual_clipped: Tensor
    """[n] the same for the dual clip."""
    out_of_band: Tensor
    """[n] bool: outside the band on either side, whatever the sign of the advantage."""
    nonfinite: Tensor
    """[n] bool: dropped, because S, the advantage or the weight is not finite."""


class PolicyObjective(Protocol):
    """A loss."""

    def __call__(self, inputs: LossInputs) -> LossTerms: ...


@dataclass(frozen=True, kw_only=True)
class SequenceLevel:
    """J = (1/N) Σ_i J_i(S_i): FSPO, RLOO or GSPO, by the band. One weight for all tokens of a sequence."""

    band: ClipBand
    dual_clip: DualClip | None = None
    temper: float = 0.0
    """b of the importance weight exp(S / L^b); 0 leaves it as it is."""
    times_length: bool = False
    """J_i counts L times, as LUSPO has it with GSPO's band."""

    def __call__(self, inputs: LossInputs) -> LossTerms:
        (log_ratio_sum,) = inputs.sequence_sums(inputs.log_ratio[None])
        terms = sequence_surrogate(
            log_ratio_sum,
            inputs.lengths,
            inputs.advantages,
            self.band,
            dual_clip=self.dual_clip,
            temper=self.temper,
        )
        if self.times_length:
            lengths = inputs.lengths.to(log_ratio_sum)
            terms = replace(terms, objective=terms.objective * lengths, weight=terms.weight * lengths)
        return weigh_sequences(inputs, log_ratio_sum, terms)


def weigh_sequences(inputs: LossInputs, log_ratio_sum: Tensor, terms: Surrogate) -> LossTerms:
    """Turn a sequence-level surrogate [n] into weights of tokens.

    Where several ranks share a sequence, all take the decision of one of them.
    """
    sides = (terms.clipped_low, terms.clipped_high, terms.dual_clipped)
    flags = [flag.to(log_ratio_sum) for flag in (*sides, terms.out_of_band, terms.nonfinite)]
    columns = torch.stack([log_ratio_sum, terms.weight, terms.ratio, terms.objective, *flags])
    log_ratio_sum, weight, ratio, objective, low, high, dual, out, broken = inputs.decided(columns)
    # Context-parallel ranks each hold some tokens of a sequence but all of its S: count J_i by tokens.
    share = _local_tokens(inputs) / inputs.lengths.clamp(min=1)
    return LossTerms(
        log_ratio_sum=log_ratio_sum,
        weight=torch.where(inputs.mask, per_token(weight, inputs), 0.0),
        ratio=ratio,
        objective=(objective * share).sum(),
        clipped_low=low,
        clipped_high=high,
        dual_clipped=dual,
        out_of_band=out > 0,
        nonfinite=broken > 0,
    )


def weigh_tokens(inputs: LossInputs, terms: Surrogate, aggregation: Aggregation) -> LossTerms:
    """Turn a token-level surrogate [t] into weights of tokens and decisions about sequences::

    "sequence-mean":  J = 1/N Σ_i 1/L_i Σ_t J_it
    "token-mean":     J = 1/T Σ_i Σ_t J_it
    """
    sides = (terms.clipped_low, terms.clipped_high, terms.dual_clipped)
    flags = (terms.nonfinite, *sides, terms.out_of_band)
    columns = torch.stack([inputs.log_ratio, *(flag.to(inputs.log_ratio.dtype) for flag in flags)])
    log_ratio_sum, nonfinite, low, high, dual, out = inputs.sequence_sums(columns)
    # One token that is not finite drops its sequence: half a response is another response.
    broken = (nonfinite > 0) | ~torch.isfinite(log_ratio_sum)
    kept = inputs.mask & ~per_token(broken, inputs)
    lengths = per_token(inputs.lengths.to(inputs.log_ratio.dtype), inputs)
    # A step whose responses are all empty has no token to weigh.
    if aggregation == "sequence-mean":
        factor = torch.where(lengths > 0, 1.0 / (max(inputs.num_sequences, 1) * lengths), 0.0)
    else:
        factor = torch.full_like(lengths, 1.0 / max(inputs.num_tokens, 1))
    scale = inputs.num_sequences * factor
    low, high, dual, out = (
        torch.where(broken, 0.0, count / inputs.lengths.clamp(min=1)) for count in (low, high, dual, out)
    )
    return LossTerms(
        log_ratio_sum=log_ratio_sum,
        weight=torch.where(kept, terms.weight * scale, 0.0),
        ratio=torch.full_like(log_ratio_sum, math.nan),
        objective=torch.where(kept, terms.objective * scale, 0.0).sum(),
        clipped_low=low,
        clipped_high=high,
        dual_clipped=dual,
        out_of_band=out > 0,
        nonfinite=broken,
    )


def per_token(values: Tensor, inputs: LossInputs) -> Tensor:
    """[n] → [t]; 0 (or False) for tokens that belong to nobody."""
    return torch.cat([values, values.new_zeros(1)])[inputs.segment]


def _local_tokens(inputs: LossInputs) -> Tensor:
    """[n] response tokens that this rank holds."""
    counts = inputs.log_ratio.new_zeros(inputs.lengths.numel() + 1)
    return counts.index_add_(0, inputs.segment, inputs.mask.to(counts.dtype))[:-1]
