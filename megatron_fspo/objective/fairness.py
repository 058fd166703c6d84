"""Length Reweighting Error (LRE): does clipping accept short and long responses at the same rate?

Two kinds of acceptance are in use and give different figures, so say which with every figure:

* out of band: ``~surrogate.out_of_band``; S inside the band, whatever the sign of A;
* sign-aware: ``~surrogate.clipped``; the gradient survives. Sequences with A = 0 can never be clipped: leave
  them out.

Pass only sequences that count: ``(lengths > 0) & ~surrogate.nonfinite``.

LRE tends to 0 as the clip rate does, so compare methods at a matched clip rate only. It is a sum of absolute
values and so above 0 by chance alone: ``null_mean`` and ``null_max`` say how far.

Shapes: N sequences, B length bins. Units: LRE is a ratio, without unit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    """``mean`` by chance alone: its average over permutations of the accept flags."""
    null_max: float = math.nan
    """``max`` by chance alone."""
    mean_interval: tuple[float, float] = (math.nan, math.nan)
    """2.5 and 97.5 percentile of ``mean`` over bootstrap resamples."""
    max_interval: tuple[float, float] = (math.nan, math.nan)
    accepted_rate: float = math.nan
    """ā: accepted share of all sequences."""
    bins: tuple[LengthBin, ...] = ()
    """Short lengths first; fewer bins than asked for where many lengths are equal."""


def length_reweighting_error(
    accepted: Tensor,
    lengths: Tensor,
    num_bins: int = 8,
    permutations: int = 200,
    bootstrap: int = 200,
    seed: int = 0,
) -> LengthReweightingError:
    """How far acceptance depends on length: LRE_mean = Σ_b p_b·|a_b/ā − 1|, LRE_max = max_b |a_b/ā − 1|.

    Args:
        accepted: bool [N], the accept flags (not the clip flags).
        lengths: L [N], response tokens. Sequences with L = 0 are left out.
        num_bins: bins at most; edges are length quantiles and equal lengths always share a bin, so that the
            figure does not depend on the order of the batch.
        permutations: for the null floor; 0 leaves it nan.
        bootstrap: resamples of sequences, bins held fixed, for the intervals; 0 leaves them nan. Responses to
            one prompt are taken as independent. The upward bias by chance is in the interval too: an interval
            that lies above zero but at the null floor shows nothing.
        seed: of a generator of its own; the global random state is not touched.

    Without sequences, or with none accepted (ā = 0), the figures are nan; with one distinct length they are
    0.

    Raises:
        ValueError: ``accepted`` is not bool, shapes differ or are not [N], num_bins < 1, a negative count.

    Source: the name and the aim are the paper's, second-hand; its formula and binning are unknown and these
    are ours.
    """
    if accepted.dtype != torch.bool or accepted.dim() != 1 or accepted.shape != lengths.shape:
        raise ValueError(
            f"accepted must be bool [N] and lengths [N], got {accepted.dtype} {[*accepted.shape]} "
            f"and {[*lengths.shape]}"
        )
    if num_bins < 1 or permutations < 0 or bootstrap < 0:
        raise ValueError(
            "num_bins must be at least 1, permutations and bootstrap at least 0, "
            f"got {num_bins}, {permutations} and {bootstrap}"
        )
    flags, lengths = accepted.detach().cpu(), lengths.detach().cpu().long()
    flags, lengths = flags[lengths > 0], lengths[lengths > 0]
    if len(flags) == 0:
        return LengthReweightingError()
    # A fixed order, so that the same sequences in another order also meet the same random draws.
    order = (2 * lengths + flags).argsort()
    flags, lengths = flags[order].double(), lengths[order]
    bins, total = length_bins(lengths, num_bins), len(lengths)
    size, generator = int(bins.max()) + 1, torch.Generator().manual_seed(seed)
    tally = _tally(bins, flags, size)
    null = tally.new_empty(permutations, 2, size)
    resampled = tally.new_empty(bootstrap, 2, size)
    # One draw of N at a time: all at once would take gigabytes for a large N and is no faster.
    for row in null:
        row.copy_(_tally(bins, flags[torch.randperm(total, generator=generator)], size))
    for row in resampled:
        draw = torch.randint(total, (total,), generator=generator)
        row.copy_(_tally(bins[draw], flags[draw], size))
    counts, passed = tally
    members = [lengths[bins == number] for number in range(len(counts))]
    mean, maximum = _errors(tally)
    null_mean, null_max = _errors(null)
    resampled_mean, resampled_max = _errors(resampled)
    return LengthReweightingError(
        mean=mean.item(),
        max=maximum.item(),
        null_mean=null_mean.mean().item(),
        null_max=null_max.mean().item(),
        mean_interval=_interval(resampled_mean),
        max_interval=_interval(resampled_max),
        accepted_rate=flags.mean().item(),
        bins=tuple(
            LengthBin(
                low=int(member.min()),
                high=int(member.max()),
                share=len(member) / len(lengths),
                accepted_rate=rate,
            )
            for member, rate in zip(members, (passed / counts).tolist(), strict=True)
        ),
    )


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


def _tally(bins: Tensor, flags: Tensor, size: int) -> Tensor:
    """Sequences and accepted sequences per bin, float64 [2, B]."""
    return torch.stack([bins.bincount(minlength=size).double(), bins.bincount(weights=flags, minlength=size)])


def _errors(tally: Tensor) -> tuple[Tensor, Tensor]:
    """LRE mean and max [...] of the counts [..., 2, B] of ``_tally``; nan where nothing is accepted (0/0)."""
    counts, passed = tally.unbind(-2)
    share = counts / counts.sum(-1, keepdim=True)
    overall = passed.sum(-1, keepdim=True) / counts.sum(-1, keepdim=True)
    # A bin that a resample missed has no rate and no share.
    error = torch.where(counts > 0, (passed / counts / overall - 1.0).abs(), 0.0)
    return (share * error).sum(-1), error.amax(-1)


def _interval(values: Tensor) -> tuple[float, float]:
    if values.isnan().all():  # also when there are none
        return math.nan, math.nan
    low, high = values.nanquantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()
    return low, high
