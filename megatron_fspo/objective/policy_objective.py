"""The clipped surrogate of a sequence, and losses by sequence and by token as per-token weights.

The gradient of a sequence-level objective is one number per sequence times Σ_t ∇log π(y_t). So that number,
``weight``, is worked out analytically and detached, and a trainer minimises −Σ_i weight_i·Σ_t log π(y_it) / N
over whatever part of the tokens it holds: no gradient has to cross the reductions that made S.

A token-level objective, such as GRPO (arXiv 2402.03300) or DAPO (arXiv 2503.14476), has one ratio and one
clip decision per token: the surrogate of sequences of one token, with the limits of ``RLOOBand``.

Shapes: N sequences (n of one micro-batch); T response tokens of all sequences, packed, without prompts (t of
one micro-batch). Units: nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from megatron_fspo.objective.band import ClipBand, DualClip


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    """Objective, derivative and flags of N sequences, or of T tokens in their place; all tensors detached.

    A sequence that is ``nonfinite`` has no other flag, and an empty one has none at all. The denominator of
    every rate is therefore the number of sequences with ``(lengths > 0) & ~nonfinite``. A rate over tokens is
    a share of tokens and must not be compared with a share of sequences.
    """

    objective: Tensor
    """J_i. The batch objective is Σ J_i / N."""
    weight: Tensor
    """dJ_i/dS_i, exactly 0 where a clip acts: the gradient of J_i is weight_i·∇S_i."""
    ratio: Tensor
    """Importance weight, a factor of ``weight``: exp(scale·S), or its tempered form; 0 where a clip acts."""
    clipped_low: Tensor
    """bool: A < 0 and S below the band."""
    clipped_high: Tensor
    """bool: A > 0 and S above the band."""
    dual_clipped: Tensor
    """bool: A < 0 and S above the dual clip."""
    below: Tensor
    """bool: S below the band, whatever the sign of A."""
    above: Tensor
    """bool: S above the band, whatever the sign of A."""
    nonfinite: Tensor
    """bool: S, A, objective or weight is not finite (exp may overflow); objective and weight are set to 0."""

    @property
    def clipped(self) -> Tensor:
        """Sign-aware rejection [N]: sequences whose gradient a clip really removes."""
        return self.clipped_low | self.clipped_high | self.dual_clipped

    @property
    def out_of_band(self) -> Tensor:
        """Out-of-band rejection [N]: S on either side of the band, whatever the sign of A."""
        return self.below | self.above


def unclipped(
    objective: Tensor, weight: Tensor, ratio: Tensor, nonfinite: Tensor, **flags: Tensor
) -> Surrogate:
    """A surrogate without limits: no flag is set but ``nonfinite`` and those that are given."""
    limits = ("clipped_low", "clipped_high", "dual_clipped", "below", "above")
    given = dict.fromkeys(limits, torch.zeros_like(nonfinite)) | flags
    return Surrogate(objective=objective, weight=weight, ratio=ratio, nonfinite=nonfinite, **given)


def sequence_surrogate(
    log_ratio_sum: Tensor,
    lengths: Tensor,
    advantages: Tensor,
    band: ClipBand,
    dual_clip: DualClip | None = None,
    temper: float = 0.0,
) -> Surrogate:
    """PPO's pessimistic minimum on one importance ratio per sequence.

    With S = Σ_t (log π_new(y_t) − log π_old(y_t)) and the ratio exp(s), s = scale·S::

        J = min(exp(s)·A, exp(scale·clip(S, low, high))·A)
        J = max(J, exp(scale·bound)·A)                           if A < 0 and there is a dual clip
        weight = dJ/dS = scale·exp(s)·A, or 0 where a clip acts

    Over thousands of tokens exp(s) spreads so far that few sequences carry the gradient. A ``temper`` b > 0
    (ours) makes its weight scale·exp(s/L^b)·A, with the same clip decisions and the same gradient at S = 0:
    J is the integral of that weight, L^b·exp(s/L^b) − L^b + 1 in the place of exp(s).

    Args:
        log_ratio_sum: S [N] in nats, float32 or float64, also the dtype of the result. Detached here.
        lengths: L [N], response tokens. A sequence with L = 0 gets objective 0, weight 0 and no flag.
        advantages: A [N]. Where A = 0 the weight is 0 and nothing counts as clipped; below/above report.
        band: limits on S and the scale of the ratio.
        dual_clip: a limit for A < 0; without it exp(s)·A is unbounded below.
        temper: b, from 0 to 1.

    Raises:
        ValueError: the three tensors are not [N] alike, S is of another dtype, or temper is out of range.

    For a token-level objective the N are tokens, L = 1 for each. One that is not finite is then reported for
    itself only: whether its sequence is dropped is the caller's decision.

    Source: the min-form on exp(S) without 1/L for FSPO is second-hand; GSPO's is in arXiv 2507.18071; the
    handling of A = 0, L = 0 and non-finite values is ours. Tokens: PPO (arXiv 1707.06347).
    """
    if log_ratio_sum.dtype not in (torch.float32, torch.float64):
        # In bfloat16 a difference loses most of a nat at 32k tokens.
        raise ValueError(f"log-ratios must be float32 or float64, got {log_ratio_sum.dtype}")
    for name, tensor in (("lengths", lengths), ("advantages", advantages)):
        if log_ratio_sum.dim() != 1 or tensor.shape != log_ratio_sum.shape:
            raise ValueError(
                f"log-ratios and {name} must both be [N], got {[*log_ratio_sum.shape]} and {[*tensor.shape]}"
            )
    if not 0.0 <= temper <= 1.0:
        raise ValueError(f"temper must be from 0 to 1, got {temper}")
    lengths = lengths.to(log_ratio_sum.dtype)  # so that float64 in gives limits in float64
    scale = band.log_ratio_scale(lengths)
    low, high = band.bounds(lengths)
    if dual_clip is None:
        dual_bound = torch.full_like(log_ratio_sum, math.inf)
    else:
        dual_bound = dual_clip.log_bound(lengths, scale)
    cooling = lengths.clamp(min=1) ** -temper
    return min_form(log_ratio_sum, advantages, low, high, dual_bound, scale, cooling, present=lengths > 0)


def min_form(
    log_ratio: Tensor,
    advantages: Tensor,
    low: Tensor,
    high: Tensor,
    dual_bound: Tensor,
    scale: Tensor,
    cooling: Tensor,
    present: Tensor,
) -> Surrogate:
    """``sequence_surrogate`` of limits that are given as numbers; all tensors [N].

    Once the sign of A is known, min and max of multiples of A are one clamp of the exponent, before exp::

        A > 0:  J = A·g(scale·min(S, high))
        A < 0:  J = A·g(scale·min(max(S, low), dual_bound))
        g(s) = exp(cooling·s)/cooling + 1 − 1/cooling, so exp(s) for cooling = 1
    """
    log_ratio, advantages = log_ratio.detach(), advantages.detach().to(log_ratio.dtype)
    positive, negative = advantages > 0, advantages < 0
    below, above = log_ratio < low, log_ratio > high
    clipped_low, clipped_high = negative & below, positive & above
    dual_clipped = negative & (log_ratio > dual_bound)

    clamped = torch.where(positive, log_ratio.minimum(high), log_ratio.maximum(low).minimum(dual_bound))
    # Everything is selected by where, never by a product: 0·inf and 0·NaN are NaN.
    ratio = (cooling * scale * clamped).exp()
    growth = ratio / cooling + (1 - 1 / cooling)
    objective = torch.where(positive | negative, growth * advantages, 0.0)
    clipped = clipped_low | clipped_high | dual_clipped
    weight = torch.where((positive | negative) & ~clipped, scale * ratio * advantages, 0.0)

    finite = log_ratio.isfinite() & advantages.isfinite() & objective.isfinite() & weight.isfinite()
    usable = present & finite
    return Surrogate(
        objective=torch.where(usable, objective, 0.0),
        weight=torch.where(usable, weight, 0.0),
        ratio=torch.where(usable & ~clipped, ratio, 0.0),
        clipped_low=clipped_low & usable,
        clipped_high=clipped_high & usable,
        dual_clipped=dual_clipped & usable,
        below=below & usable,
        above=above & usable,
        nonfinite=present & ~finite,
    )


Aggregation = Literal["sequence-mean", "token-mean"]


@dataclass(frozen=True, kw_only=True)
class TurnInputs:
    """The m turns of n trajectories in t tokens."""

    segment: Tensor
    """[t] turn of each token, in [0, m]; m belongs to nobody."""
    owner: Tensor
    """[m] trajectory of each turn."""
    lengths: Tensor
    """[m] tokens of each."""
    sums: Callable[[Tensor], Tensor]
    """[k, t] → [k, m], as ``LossInputs.sequence_sums``."""


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
    turns: TurnInputs | None = None
    """None: each sequence is one turn."""


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
    unit: Literal["trajectory", "turn"] = "trajectory"
    """turn: J_i is the sum over the turns of a trajectory, each with its own S, L and decision (ours); one
    that is not finite drops the trajectory."""

    def __call__(self, inputs: LossInputs) -> LossTerms:
        whole, turns = inputs, inputs.turns if self.unit == "turn" else None
        if turns is not None:
            inputs = replace(
                inputs,
                segment=turns.segment,
                lengths=turns.lengths,
                advantages=inputs.advantages[turns.owner],
                sequence_sums=turns.sums,
            )
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
        if turns is None:
            return weigh_sequences(inputs, log_ratio_sum, terms)
        broken = _over_turns(terms.nonfinite, turns, whole)[turns.owner] > 0
        objective, weight = (torch.where(broken, 0.0, one) for one in (terms.objective, terms.weight))
        terms = replace(terms, objective=objective, weight=weight, nonfinite=broken)
        return _of_trajectories(weigh_sequences(inputs, log_ratio_sum, terms), turns, whole)


def _over_turns(values: Tensor, turns: TurnInputs, whole: LossInputs) -> Tensor:
    """[m] → [n]: sums over the turns of each trajectory, float64."""
    sums = torch.zeros(whole.lengths.numel(), dtype=torch.float64, device=values.device)
    return sums.index_add_(0, turns.owner, values.double())


def _of_trajectories(terms: LossTerms, turns: TurnInputs, whole: LossInputs) -> LossTerms:
    """The terms of turns as those of their trajectories: what is clipped are shares of the turns."""
    kind = terms.log_ratio_sum.dtype
    count = _over_turns(torch.ones_like(turns.owner), turns, whole).clamp(min=1)
    clipped = {
        name: (_over_turns(getattr(terms, name), turns, whole) / count).to(kind)
        for name in ("clipped_low", "clipped_high", "dual_clipped")
    }
    log_ratio_sum = _over_turns(terms.log_ratio_sum, turns, whole).to(kind)
    return replace(
        terms,
        **clipped,
        log_ratio_sum=log_ratio_sum,
        ratio=torch.full_like(log_ratio_sum, math.nan),
        out_of_band=_over_turns(terms.out_of_band, turns, whole) > 0,
        nonfinite=_over_turns(terms.nonfinite, turns, whole) > 0,
    )


def weigh_sequences(inputs: LossInputs, log_ratio_sum: Tensor, terms: Surrogate) -> LossTerms:
    """Turn a sequence-level surrogate [n] into weights of tokens.

    Where several ranks share a sequence, all take the decision of one of them.
    """
    sides = (terms.clipped_low, terms.clipped_high, terms.dual_clipped)
    flags = [flag.to(log_ratio_sum) for flag in (*sides, terms.out_of_band, terms.nonfinite)]
    columns = torch.stack([log_ratio_sum, terms.weight, terms.ratio, terms.objective, *flags])
    log_ratio_sum, weight, ratio, objective, low, high, dual, out, broken = inputs.decided(columns)
    # Context-parallel ranks each hold some tokens of a sequence but all of its S: count J_i by tokens.
    counts = inputs.log_ratio.new_zeros(inputs.lengths.numel() + 1)
    held = counts.index_add_(0, inputs.segment, inputs.mask.to(counts.dtype))[:-1]
    share = held / inputs.lengths.clamp(min=1)
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
