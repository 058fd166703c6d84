"""The figures of each loss on a dump, and where losses disagree."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fspo.errors import InputError
from megatron_fspo.lab.explain.chance import Source, noise_alone
from megatron_fspo.lab.explain.decomposition import Parts, growth, take_apart
from megatron_fspo.lab.explain.dump import Dump
from megatron_fspo.lab.explain.flips import Flips, measure_flips
from megatron_fspo.lab.explain.losses import Decisions, factor_for, judge, reach
from megatron_fspo.losses import PolicyLossConfig
from megatron_fspo.objective import LengthReweightingError, length_reweighting_error
from megatron_fspo.objective.calibration import Exponent, sigma_hat
from megatron_fspo.objective.fairness import length_bins

NUM_BINS = 8
_EXAMPLES = 3
_QUARTILES = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class LengthFigures:
    """Figures of a loss over the responses of a bin of lengths."""

    out_of_band: float
    clipped: float
    """Share of those with A ≠ 0; NaN where there are none."""
    clipped_falling: float
    """Of those with A < 0."""
    clipped_rising: float
    """Of those with A > 0."""
    noise: float
    """Share that noise alone puts out of band."""
    ess: float
    """Effective sample size of the importance weights, as a share of their number; NaN without any."""
    mass: float
    """Share of the batch's gradient mass."""


@dataclass(frozen=True, kw_only=True)
class LossFigures:
    """Figures of a loss with the limits that are named. Shares are of all responses, but for ``clipped``, of
    those with A ≠ 0, and ``clipped_tokens``, of the response tokens."""

    name: str
    limits: dict[str, float]
    out_of_band: float
    clip_low: float
    clip_high: float
    dual_clip: float
    clipped: float
    clipped_tokens: float
    dropped: int
    """Responses whose weight is not finite."""
    noise: float
    lre: LengthReweightingError
    """LRE of out-of-band acceptance."""
    lre_signed: LengthReweightingError
    """LRE of sign-aware acceptance, among responses with A ≠ 0."""
    lre_within_sign: LengthReweightingError
    """The same among those with one sign of A."""
    lre_within_update: LengthReweightingError | None
    """The same among those of one optimizer step on the rollout; None where the dump does not name it."""
    ess: float
    by_length: tuple[LengthFigures, ...]


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """Responses with an advantage that one loss keeps and another clips, wholly or in part."""

    kept_by: str
    clipped_by: str
    responses: int
    in_part: int
    """Responses among these with some tokens clipped and others not."""
    share: float
    """Share of the responses with A ≠ 0."""
    lengths: tuple[int, ...]
    """Quartiles of their L; zeros where there are none."""
    rising: float
    """Share with A > 0, NaN where there are none."""
    mean_reward: float
    """NaN where the dump has no rewards, or there are none."""
    examples: tuple[int, ...]
    """Rows of the furthest apart, a few: most gradient mass lost."""


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Responses with low <= L <= high."""

    low: int
    high: int
    share: float
    tokens: float
    """Share of the response tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Explanation:
    """All figures of a dump."""

    dump: Dump
    bins: tuple[Bin, ...]
    sigma: float
    """Robust spread of S/√L, in nats per √token."""
    exponent: Exponent | str
    """a in spread(S) ∝ L^a, 0.5 for a random walk; or why it cannot be measured."""
    parts: Parts | None
    """S taken apart; None without tokens."""
    flips: Flips | None
    """The part of flipped routes; None without any."""
    noise_source: Source
    given: tuple[LossFigures, ...]
    """With the limits that were asked for."""
    decisions: tuple[Decisions, ...]
    rate: float
    """The share outside at which losses are compared; NaN where there is none."""
    matched: tuple[LossFigures, ...]
    """With limits that give this rate; empty without one."""
    disagreements: tuple[Disagreement, ...]


def explain_dump(dump: Dump, losses: Sequence[PolicyLossConfig], rate: float | None = None) -> Explanation:
    """Compare the losses, each with its limits, on a dump; ``rate`` is the out-of-band share at which they
    are compared, by default that of the first with its limits."""
    bins = length_bins(dump.lengths, NUM_BINS)
    noise, source = noise_alone(dump)
    reaches, noisy = ([reach(loss, source) for loss in losses] for source in (dump, noise))
    decisions = tuple(judge(loss, dump) for loss in losses)
    given = tuple(
        _explain_loss(loss, dump, decided, far > 1, bins)
        for loss, decided, far in zip(losses, decisions, noisy, strict=True)
    )
    wanted = given[0].out_of_band if rate is None else rate
    if rate is not None and not 1 <= rate * len(dump) < len(dump):
        raise InputError(
            f"--rate {rate:g}: of {len(dump)} responses, it must leave at least one on each side"
        )
    matched: list[LossFigures] = []
    if 0 < wanted < 1:
        for loss, far, by_noise in zip(losses, reaches, noisy, strict=True):
            factor = min(factor_for(far, wanted), loss.widest())
            same = loss.scaled(factor)
            matched.append(_explain_loss(same, dump, judge(same, dump), by_noise > factor, bins))
    tokens = dump.log_ratio
    return Explanation(
        dump=dump,
        bins=tuple(
            Bin(
                low=int(lengths.min()),
                high=int(lengths.max()),
                share=len(lengths) / len(dump),
                tokens=lengths.sum().item() / dump.lengths.sum().item(),
            )
            for lengths in (dump.lengths[bins == number] for number in range(int(bins.max()) + 1))
        ),
        sigma=sigma_hat(dump.log_ratio_sum, dump.lengths),
        exponent=growth(dump.log_ratio_sum, dump.lengths, dump.clusters),
        parts=None if tokens is None else take_apart(tokens, dump.lengths, dump.clusters),
        flips=measure_flips(dump, losses, bins) if dump.flipped.any() else None,
        noise_source=source,
        given=given,
        decisions=decisions,
        rate=wanted if matched else math.nan,
        matched=tuple(matched),
        disagreements=tuple(_disagreements(dump, [loss.name for loss in losses], decisions)),
    )


def _explain_loss(
    loss: PolicyLossConfig, dump: Dump, decided: Decisions, by_noise: Tensor, bins: Tensor
) -> LossFigures:
    """Return the figures of a loss; ``by_noise`` [a multiple of N] bool: outside, of ``noise_alone``."""
    counts, judged = ~decided.dropped, ~decided.dropped & (dump.advantages != 0)
    noisy = by_noise.double().view(-1, len(dump)).mean(0)
    clipped, lengths = decided.clipped > 0, dump.lengths
    return LossFigures(
        name=loss.name,
        limits=loss.limits(),
        out_of_band=_mean(decided.outside[counts]),
        clip_low=_mean(decided.clipped_low[counts]),
        clip_high=_mean(decided.clipped_high[counts]),
        dual_clip=_mean(decided.dual_clipped[counts]),
        clipped=_mean(clipped[judged]),
        clipped_tokens=((decided.clipped * lengths)[counts].sum() / lengths[counts].sum()).item(),
        dropped=int(decided.dropped.sum()),
        noise=noisy.mean().item(),
        lre=_lre(~decided.outside, dump, counts),
        lre_signed=_lre(~clipped, dump, judged),
        lre_within_sign=_lre(~clipped, dump, judged, dump.advantages > 0),
        lre_within_update=_lre(~clipped, dump, judged, dump.updates) if dump.updates.any() else None,
        ess=decided.effective_sample_size(judged),
        by_length=tuple(
            LengthFigures(
                out_of_band=_mean(decided.outside[counts & here]),
                clipped=_mean(clipped[judged & here]),
                clipped_falling=_mean(clipped[judged & here & (dump.advantages < 0)]),
                clipped_rising=_mean(clipped[judged & here & (dump.advantages > 0)]),
                noise=_mean(noisy[here]),
                ess=decided.effective_sample_size(judged & here),
                mass=(decided.mass[here].sum() / decided.mass.sum()).item(),
            )
            for here in (bins == number for number in range(int(bins.max()) + 1))
        ),
    )


def _lre(accepted: Tensor, dump: Dump, rows: Tensor, strata: Tensor | None = None) -> LengthReweightingError:
    return length_reweighting_error(
        accepted[rows],
        dump.lengths[rows],
        NUM_BINS,
        clusters=dump.clusters[rows],
        strata=None if strata is None else strata[rows],
    )


def _disagreements(
    dump: Dump, names: Sequence[str], decisions: Sequence[Decisions]
) -> Iterator[Disagreement]:
    outcomes = [decided.outcomes(dump.advantages) for decided in decisions]
    judged = int((dump.advantages != 0).sum())
    for keeper, other in itertools.permutations(range(len(names)), 2):
        rows = torch.nonzero((outcomes[keeper] == 0) & ((outcomes[other] == 1) | (outcomes[other] == 2)))[
            :, 0
        ]
        lengths = dump.lengths[rows].double()
        heaviest = rows[decisions[keeper].mass[rows].argsort(descending=True)[:_EXAMPLES]]
        yield Disagreement(
            kept_by=names[keeper],
            clipped_by=names[other],
            responses=len(rows),
            in_part=int((outcomes[other][rows] == 2).sum()),
            share=len(rows) / judged if judged else math.nan,
            lengths=tuple(lengths.quantile(_QUARTILES).int().tolist()) if len(rows) else (0, 0, 0),
            rising=_mean(dump.advantages[rows] > 0),
            mean_reward=math.nan if dump.rewards is None else _mean(dump.rewards[rows]),
            examples=tuple(dump.rows[heaviest].tolist()),
        )


def _mean(values: Tensor) -> float:
    return values.double().mean().item() if len(values) else math.nan
