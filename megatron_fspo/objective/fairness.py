"""Length Reweighting Error (LRE): does clipping accept short and long responses at the same rate?

Two kinds of acceptance are in use and give different figures, so say which with every figure:

* out of band: ``~surrogate.out_of_band``; S inside the band, whatever the sign of A;
* sign-aware: ``~surrogate.clipped``; the gradient survives. Sequences with A = 0 can never be clipped: leave
  them out.

Pass only sequences that count: ``(lengths > 0) & ~surrogate.nonfinite``.

LRE tends to 0 as the clip rate does, so compare methods at a matched clip rate only. It is a sum of absolute
values and so above 0 by chance alone: ``null_mean`` and ``null_max`` say how far.

Acceptance also depends on the sign of A and on the optimizer step, and these go with length: give them as
``strata`` for LRE within them, or in the place of lengths for the same error between them.

Shapes: N sequences, B length bins. Units: LRE is a ratio, without unit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LengthBin:
    """Sequences with low <= L <= high, the shortest and the longest length in the bin."""

    low: int
    high: int
    share: float
    """p_b: share of all sequences."""
    accepted_rate: float
    """a_b: accepted share of the bin's sequences."""


@dataclass(frozen=True, kw_only=True)
class LengthReweightingError:
    """LRE with its null floor and bootstrap interval; see ``length_reweighting_error``."""

    mean: float = math.nan
    """Σ_b p_b·|a_b/ā − 1|"""
    max: float = math.nan
    """max_b |a_b/ā − 1|"""
    null_mean: float = math.nan
    """``mean`` by chance alone: its average over errors of chance."""
    null_max: float = math.nan
    """``max`` by chance alone."""
    mean_interval: tuple[float, float] = (math.nan, math.nan)
    """95%; without the bias of ``mean``, so that it may lie below it."""
    max_interval: tuple[float, float] = (math.nan, math.nan)
    accepted_rate: float = math.nan
    """ā: accepted share of all sequences."""
    bins: tuple[LengthBin, ...] = ()
    """Short lengths first; fewer bins than asked for where many lengths are equal."""


def length_reweighting_error(
    accepted: Tensor,
    lengths: Tensor,
    num_bins: int = 8,
    *,
    clusters: Tensor | None = None,
    strata: Tensor | None = None,
    draws: int = 1000,
    interval: bool = True,
    seed: int = 0,
) -> LengthReweightingError:
    """How far acceptance depends on length: LRE_mean = Σ_b p_b·|a_b/ā − 1|, LRE_max = max_b |a_b/ā − 1|.

    Chance moves the deviations d_b = a_b/ā − 1 by errors whose covariance comes from what each cluster adds
    to them. Errors drawn from that normal law alone give the null floor. The interval holds every LRE of
    which the measured one is not in the outer 2.5% on either side: of deviations in proportion to those
    measured, with such errors.

    Args:
        accepted: bool [N], the accept flags (not the clip flags).
        lengths: L [N], response tokens. Sequences with L = 0 are left out.
        num_bins: bins at most; edges are length quantiles and equal lengths always share a bin, so that the
            figure does not depend on the order of the batch.
        clusters: int64 [N]; sequences of different clusters are independent: the prompt of each, say. Without
            them all sequences are.
        strata: int64 [N]; LRE is then computed within each, against its own ā, and averaged by their numbers
            of sequences. A stratum of which nothing is accepted is left out.
        draws: of the errors of chance; 0 leaves floor and intervals nan.
        interval: False leaves the intervals nan.
        seed: of a generator of its own; the global random state is not touched.

    Without sequences, or with none accepted (ā = 0), the figures are nan; with one distinct length they are
    0.

    Raises:
        ValueError: ``accepted`` is not bool, shapes differ or are not [N], num_bins < 1, draws < 0.

    Source: the name and the aim are the paper's, second-hand; its formula and binning are unknown and these
    are ours, as the interval is (`benchmarks/interval_coverage.py` measures what it covers).
    """
    if accepted.dtype != torch.bool or accepted.dim() != 1 or accepted.shape != lengths.shape:
        got = f"{accepted.dtype} {[*accepted.shape]} and {[*lengths.shape]}"
        raise ValueError(f"accepted must be bool [N] and lengths [N], got {got}")
    if num_bins < 1 or draws < 0:
        raise ValueError(f"num_bins must be at least 1 and draws at least 0, got {num_bins} and {draws}")
    lengths = lengths.detach().cpu().long()
    full = lengths > 0
    flags, lengths = accepted.detach().cpu()[full].double(), lengths[full]
    if len(flags) == 0:
        return LengthReweightingError()
    bins = length_bins(lengths, num_bins)
    size = int(bins.max()) + 1
    stratum, cluster = torch.zeros_like(bins), None  # numbers from 0 without gaps
    if strata is not None:
        stratum = torch.unique(strata.detach().cpu()[full], return_inverse=True)[1]
    if clusters is not None:
        cluster = torch.unique(clusters.detach().cpu()[full], return_inverse=True)[1]
    # Cells of a stratum and a bin; an empty one has no rate and no weight.
    cells = stratum * size + bins
    shape = (int(stratum.max()) + 1, size)
    counts = cells.bincount(minlength=shape[0] * size).double()
    passed = cells.bincount(weights=flags, minlength=len(counts))
    members, kept = counts.view(shape).sum(1), passed.view(shape).sum(1)
    overall = (kept / members).repeat_interleave(size)
    used = (overall > 0) & (counts > 0)
    rates = passed / counts.clamp(min=1)
    deviations = torch.where(used, rates / overall - 1.0, 0.0)
    weights = torch.where(used, counts, 0.0)
    weights /= weights.sum()  # nan where nothing is accepted
    measured = _measures(deviations[None], weights, shape)
    figures: dict[str, Any] = {"mean": measured[0].item(), "max": measured[1].item()}
    if draws:
        spread = _spread(flags, cells, cluster, rates, overall, counts, members)
        spread = torch.where(used[:, None], spread, 0.0)
        generator = torch.Generator().manual_seed(seed)
        errors = torch.randn(draws, spread.shape[1], generator=generator, dtype=torch.float64) @ spread.T
        floors = _measures(errors, weights, shape)
        for which, name in enumerate(("mean", "max")):
            figures[f"null_{name}"] = floors[which].mean().item()
            if interval:
                figures[f"{name}_interval"] = _interval(deviations, errors, weights, shape, which)
    in_bins = zip(*(values.view(shape).sum(0).tolist() for values in (counts, passed)), strict=True)
    ends = [(int(own.min()), int(own.max())) for own in (lengths[bins == number] for number in range(size))]
    rates_of = tuple(
        LengthBin(low=low, high=high, share=count / len(flags), accepted_rate=good / count)
        for (low, high), (count, good) in zip(ends, in_bins, strict=True)
    )
    return LengthReweightingError(**figures, accepted_rate=flags.mean().item(), bins=rates_of)


def effective_sample_size(weights: Tensor) -> float:
    """(Σ w)² / (N Σ w²) of weights w [N], at least 0: the share of N that equal weights would need to be.

    1 where all are equal, 1/N where one has everything; nan without any weight above 0. Source: Kish (1965).
    """
    scaled = weights.detach().double() / weights.max().clamp(min=1e-300)  # squares do not overflow
    squares = scaled.square().sum().item()
    return scaled.sum().item() ** 2 / (len(weights) * squares) if squares else math.nan


def length_bins(lengths: Tensor, num_bins: int) -> Tensor:
    """Bin of each sequence [N], int64 from 0 without gaps: length quantiles, equal lengths in one bin."""
    if len(lengths) == 0:
        return torch.zeros_like(lengths, dtype=torch.int64)
    ranks = torch.arange(1, num_bins, device=lengths.device) * len(lengths) // num_bins
    edges = lengths.sort().values[ranks]
    # A bin is a function of the length alone. Equal edges leave empty bins between them: renumber the rest.
    bins: Tensor = torch.unique(torch.bucketize(lengths, edges, right=True), return_inverse=True)[1]
    return bins


def _spread(
    flags: Tensor,
    cells: Tensor,
    clusters: Tensor | None,
    rates: Tensor,
    overall: Tensor,
    counts: Tensor,
    members: Tensor,
) -> Tensor:
    """A root [C, C] of the covariance of the deviations of C cells: from what clusters add to their rates and
    to those of their strata, to first order."""
    size, width = len(counts), len(counts) // len(members)
    times = torch.ones(1)
    if clusters is None or int(clusters.max()) + 1 == len(clusters):
        # Independent rows of one cell and flag add the same: so many at once.
        clusters = torch.unique(2 * cells + flags.long(), return_inverse=True)[1]
        times = clusters.bincount()
    number, rows = int(clusters.max()) + 1, clusters * size + cells
    times_in, off, about = (
        rows.bincount(weights=values, minlength=number * size).view(number, size)
        for values in (torch.ones_like(flags), flags - overall[cells], flags - rates[cells])
    )
    # Clusters behind a rate: residuals of few are too small. Those of one are 0: about the rate of all.
    behind = counts.square() / (times_in.square() / times[:, None]).sum(0).clamp(min=1)
    about *= (behind / (behind - 1).clamp(min=0.5)).sqrt()
    total = off.view(number, len(members), width).sum(2) / members
    scale = torch.where(overall > 0, overall, 1.0)
    added = torch.where(behind < 1.5, off, about) / counts.clamp(min=1) / scale
    added -= rates / scale.square() * total.repeat_interleave(width, dim=1)
    covariance = added.T @ (added / times[:, None])
    values, vectors = torch.linalg.eigh(covariance)
    root: Tensor = vectors * values.clamp(min=0).sqrt() @ vectors.T  # symmetric, so rounding moves it little
    return root


def _measures(deviations: Tensor, weights: Tensor, shape: tuple[int, int]) -> Tensor:
    """LRE mean and max [2, draws] of deviations [draws, C]; the max is averaged over strata."""
    sizes = deviations.abs()
    by_stratum = weights.view(shape).sum(1)
    largest = sizes.view(-1, *shape).amax(2) @ by_stratum
    return torch.stack([sizes @ weights, largest])


def _interval(
    deviations: Tensor, errors: Tensor, weights: Tensor, shape: tuple[int, int], which: int
) -> tuple[float, float]:
    """95% interval of LRE mean (which = 0) or max (1) from deviations [C] and errors of chance [draws, C]."""

    measured = _measures(deviations[None], weights, shape)[which].item()
    if not measured > 0:
        return measured, measured
    # Errors of neighbouring bins go together, so their part in LRE hangs on the signs of the deviations, of
    # which chance turns some over: also of a straight line through them.
    place = torch.arange(shape[1], dtype=weights.dtype).expand(shape)
    share, value = weights.view(shape), deviations.view(shape)
    place = place - (share * place).sum(1, keepdim=True) / share.sum(1, keepdim=True).clamp(min=1e-300)
    slope = (share * place * value).sum(1, keepdim=True) / (share * place**2).sum(1, keepdim=True).clamp(
        min=1e-300
    )
    ends: list[float] = []
    for direction in (deviations, (slope * place).flatten()):
        length = _measures(direction[None], weights, shape)[which].item()
        for tail in (0.975, 0.025) if length > 0 else ():

            def below(size: float, direction: Tensor = direction / length, tail: float = tail) -> bool:
                return bool(
                    _measures(size * direction + errors, weights, shape)[which].quantile(tail) < measured
                )

            low, high = 0.0, measured
            while below(high) and high < 1e3 * measured:
                high *= 2
            for _ in range(14):
                middle = (low + high) / 2
                low, high = (middle, high) if below(middle) else (low, middle)
            ends.append(low)
    return min(ends), max(ends)
