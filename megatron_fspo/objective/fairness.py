"""Length reweighting error (LRE): how unevenly clipping accepts short and long responses.

Two kinds of acceptance give different figures, so name the kind with every figure:

* ``~surrogate.out_of_band``: S is in the band, whatever the sign of A.
* ``~surrogate.clipped``: the gradient survives. Leave out sequences with A = 0, which are never clipped.

Pass only sequences with ``(lengths > 0) & ~surrogate.nonfinite``.

LRE tends to 0 with the clip rate, so compare methods only at the same clip rate. As a sum of absolute values,
it exceeds 0 by chance alone; ``null_mean`` and ``null_max`` say by how much.

Acceptance also depends on the sign of A and on the optimizer step, which correlate with length. Pass them as
``strata`` for the LRE within them, or in place of ``lengths`` for the same error between them.

Shapes: N sequences, B length bins. LRE is a ratio without unit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LengthBin:
    """Sequences with low <= L <= high, the shortest and longest length in the bin."""

    low: int
    high: int
    share: float
    """p_b: share of all sequences."""
    accepted_rate: float
    """a_b: accepted share of the bin's sequences."""


@dataclass(frozen=True, kw_only=True)
class LengthReweightingError:
    """LRE with its null values and confidence intervals; see :func:`length_reweighting_error`."""

    mean: float = math.nan
    """Σ_b p_b·|a_b/ā − 1|"""
    max: float = math.nan
    """max_b |a_b/ā − 1|"""
    null_mean: float = math.nan
    """Expected ``mean`` if acceptance does not depend on length."""
    null_max: float = math.nan
    """Expected ``max`` if acceptance does not depend on length."""
    mean_interval: tuple[float, float] = (math.nan, math.nan)
    """95% interval. It corrects the upward bias of ``mean``, so it may lie below it."""
    max_interval: tuple[float, float] = (math.nan, math.nan)
    accepted_rate: float = math.nan
    """ā: accepted share of all sequences."""
    bins: tuple[LengthBin, ...] = ()
    """Short lengths first; fewer than ``num_bins`` if many lengths are equal."""


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
    """Return how acceptance depends on length: LRE_mean = Σ_b p_b·|a_b/ā − 1|, LRE_max = max_b |a_b/ā − 1|.

    Chance adds errors to the deviations d_b = a_b/ā − 1. They are drawn from a normal distribution with a
    covariance estimated from each cluster's contribution, and alone give the null values. The interval holds
    every LRE whose sampling distribution has the measured one in its central 95%, assuming true deviations in
    proportion to the measured ones.

    Args:
        accepted: bool [N], accept flags (not clip flags).
        lengths: L [N], response tokens. Sequences with L = 0 are ignored.
        num_bins: most bins; edges are length quantiles, and equal lengths share a bin, so the result does not
            depend on the order of the batch.
        clusters: int64 [N]; sequences of different clusters (prompts) are independent. None: all are.
        strata: int64 [N]; LRE is computed within each stratum, against its own ā, and averaged by number of
            sequences. Strata without an accepted sequence are left out.
        draws: number of draws of the errors; 0 leaves null values and intervals NaN.
        interval: False leaves the intervals NaN.
        seed: for a generator of its own; the global random state is not used.

    All figures are NaN if no sequence is accepted (ā = 0) or given, and 0 if there is one distinct length.

    Raises:
        ValueError: ``accepted`` is not bool, shapes differ or are not [N], num_bins < 1, draws < 0.

    Source: the abstracts of arXiv 2509.09177 name LRE. Its formula and bins are not known to us: these are
    ours, and so is the interval (`benchmarks/interval_coverage.py` measures its coverage).
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
    # A cell is a bin of a stratum; an empty one has no rate and no weight.
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
    """Return (Σ w)² / (N Σ w²) for weights w [N] >= 0: 1 if all are equal, 1/N if only one is above 0, NaN if
    none is. Source: Kish (1965)."""
    scaled = weights.detach().double() / weights.max().clamp(min=1e-300)  # squares do not overflow
    squares = scaled.square().sum().item()
    return scaled.sum().item() ** 2 / (len(weights) * squares) if squares else math.nan


def length_bins(lengths: Tensor, num_bins: int) -> Tensor:
    """Return the bin of each sequence [N], int64 from 0 without gaps: quantiles, equal lengths in one bin."""
    if len(lengths) == 0:
        return torch.zeros_like(lengths, dtype=torch.int64)
    ranks = torch.arange(1, num_bins, device=lengths.device) * len(lengths) // num_bins
    edges = lengths.sort().values[ranks]
    # A bin depends on the length alone. Equal edges leave empty bins between them: renumber the others.
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
    """Return a root [C, C] of the covariance of the deviations of C cells, to first order, from what each
    cluster contributes to the rates of cells and strata."""
    size, width = len(counts), len(counts) // len(members)
    times = torch.ones(1)
    if clusters is None or int(clusters.max()) + 1 == len(clusters):
        # Independent sequences with the same cell and flag contribute the same: group them, and count them.
        clusters = torch.unique(2 * cells + flags.long(), return_inverse=True)[1]
        times = clusters.bincount()
    number, rows = int(clusters.max()) + 1, clusters * size + cells
    times_in, off, about = (
        rows.bincount(weights=values, minlength=number * size).view(number, size)
        for values in (torch.ones_like(flags), flags - overall[cells], flags - rates[cells])
    )
    # Clusters behind a rate. Residuals of few are too small: scale them. Those of one are 0: use the distance
    # from the overall rate.
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
    """Return LRE mean and max [2, draws] for deviations [draws, C]; the max is averaged over strata."""
    sizes = deviations.abs()
    by_stratum = weights.view(shape).sum(1)
    largest = sizes.view(-1, *shape).amax(2) @ by_stratum
    return torch.stack([sizes @ weights, largest])


def _interval(
    deviations: Tensor, errors: Tensor, weights: Tensor, shape: tuple[int, int], which: int
) -> tuple[float, float]:
    """Return the 95% interval of LRE mean (which = 0) or max (1), given deviations [C] and errors [draws,
    C]."""

    measured = _measures(deviations[None], weights, shape)[which].item()
    if not measured > 0:
        return measured, measured
    # Errors of neighbouring bins are correlated, so their effect on LRE depends on the signs of the
    # deviations, and chance flips some of these. Hence also try a straight line through the deviations.
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
