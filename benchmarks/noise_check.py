"""What one calibration predicts, and what another of the same model with other responses then measures.

    megatron-fspo calibrate --config run.toml --run.name a
    megatron-fspo calibrate --config run.toml --run.name b --run.seed 2
    python benchmarks/noise_check.py runs/a.calibrate/calibration.json runs/b.calibrate/calibration.json

Share of responses outside ±c·√L by noise alone, in four groups by length; c is twice, once and half the
noise's own sigma. The interval is that of the measured share. ``*``: it does not hold the prediction; ``**``:
nor does 0 lie in the 95% interval of their difference (Newcombe 1998, method 10), the prediction being an
estimate from a finite number of responses as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from machine import options_of
from megatron_fspo.evaluation.intervals import Estimate, wilson_interval
from megatron_fspo.lab.explain.decomposition import Halves, decompose
from megatron_fspo.objective import FSPOBand
from megatron_fspo.objective.fairness import length_bins
from megatron_fspo.objective.noise import Noise
from megatron_fspo.trainer.noise import read_calibration


def difference_interval(first: Estimate, second: Estimate) -> Estimate:
    """First less second, which are independent (Newcombe 1998, Statistics in Medicine 17, method 10)."""
    value = first.value - second.value
    return Estimate(
        value=value,
        low=value - math.hypot(first.value - first.low, second.high - second.value),
        high=value + math.hypot(first.high - first.value, second.value - second.low),
    )


def rates_as_of(known: Halves, lengths: Tensor, band: FSPOBand) -> Tensor:
    """Share [N] of responses of ``lengths`` [N] outside of the band, from the parts of S of others and the
    shape that it has with these taken out, one for all lengths."""
    parts = decompose(known)

    def reduced(sums: Tensor, of: Tensor) -> Tensor:
        return (sums - parts.drift * of) / (parts.noise**2 * of + (parts.signal * of) ** 2).sqrt()

    shape = reduced(known.log_ratio_sums, known.lengths.double()).sort().values
    low, high = (reduced(edge.double(), lengths.double()) for edge in band.bounds(lengths.double()))
    below = torch.searchsorted(shape, low)
    above = len(shape) - torch.searchsorted(shape, high, right=True)
    return (below + above).double() / len(shape)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Of a group of lengths."""

    c: float
    lengths: str
    responses: int
    predicted: float
    behind: int
    """Responses behind the prediction."""
    measured: float

    @property
    def interval(self) -> Estimate:
        """The measured share."""
        return wilson_interval(self.measured, self.responses)

    @property
    def inside(self) -> bool:
        """Whether its interval holds the prediction."""
        return self.interval.low <= self.predicted <= self.interval.high

    @property
    def difference(self) -> Estimate:
        """The measured share less the predicted one."""
        return difference_interval(self.interval, wilson_interval(self.predicted, self.behind))

    @property
    def consistent(self) -> bool:
        """Whether the two shares may be the same."""
        return self.difference.low <= 0 <= self.difference.high


def rows(first: Noise, second: Noise, widths: Sequence[float]) -> Iterator[Row]:
    """Per width and group of lengths."""
    lengths = second.lengths
    sums = second.drift * lengths + lengths.sqrt() * second.residuals
    bins = length_bins(lengths, 4)
    for c in widths or [multiple * first.sigma for multiple in (2.0, 1.0, 0.5)]:
        predicted = first.clip_rates(lengths, FSPOBand(c_low=c, c_high=c))
        outside = sums.abs() > c * lengths.sqrt()
        for number in bins.unique().tolist():
            here = bins == number
            yield Row(
                c=c,
                lengths=f"{int(lengths[here].min())}-{int(lengths[here].max())}",
                responses=int(here.sum()),
                predicted=predicted[here].mean().item(),
                behind=first.nearest,
                measured=outside[here].double().mean().item(),
            )


def main() -> None:
    """Print the table, and how many predictions hold."""
    parser = options_of(__doc__)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--c", type=float, nargs="+", default=[], help="widths, in place of those by sigma")
    arguments = parser.parse_args()
    first, second = read_calibration(arguments.first), read_calibration(arguments.second)
    found: list[Row] = []
    print("comparison                  c  tokens   responses  predicted  measured")
    for one, other in zip(first.comparisons, second.comparisons, strict=True):
        for row in rows(one.noise(), other.noise(), arguments.c) if one.sigma[0] else ():
            found.append(row)
            low, high = row.interval.low, row.interval.high
            mark = "" if row.inside else " *" if row.consistent else " **"
            print(
                f"{f'{one.kind}, {one.precision}':<22} {row.c:>6.3f}  {row.lengths:<9} {row.responses:>8}   "
                f"{row.predicted:>8.1%}   {row.measured:>6.1%} [{low:.1%}, {high:.1%}]{mark}"
            )
    inside, consistent = sum(row.inside for row in found), sum(row.consistent for row in found)
    print(f"{len(found)} predictions: {inside} inside the measured interval, {consistent} consistent with it")


if __name__ == "__main__":
    main()
