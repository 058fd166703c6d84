"""What one calibration predicts, and what another of the same model with other responses then measures.

    megatron-fspo calibrate --config run.toml --run.name a
    megatron-fspo calibrate --config run.toml --run.name b --run.seed 2
    python benchmarks/noise_check.py runs/a.calibrate/calibration.json runs/b.calibrate/calibration.json

Share of responses outside ±c·√L by noise alone, in four groups by length; c is twice, once and half the
noise's own sigma. ``*``: the prediction lies outside the 95% interval of what was measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from megatron_fspo.objective import FSPOBand
from megatron_fspo.objective.fairness import length_bins
from megatron_fspo.objective.noise import Noise
from megatron_fspo.trainer.history import wilson_interval
from megatron_fspo.trainer.noise import read_calibration

Row = tuple[str, float, str, int, float, float, float, float]


def rows(name: str, first: Noise, second: Noise) -> Iterator[Row]:
    """Per width and group of lengths: predicted, measured and its interval."""
    lengths = second.lengths
    sums = second.drift * lengths + lengths.sqrt() * second.residuals
    bins = length_bins(lengths, 4)
    for width in (2.0, 1.0, 0.5):
        c = width * first.sigma
        predicted = first.clip_rates(lengths, FSPOBand(c_low=c, c_high=c))
        outside = sums.abs() > c * lengths.sqrt()
        for number in bins.unique().tolist():
            here = bins == number
            count = int(here.sum())
            rate = outside[here].double().mean().item()
            span = f"{int(lengths[here].min())}-{int(lengths[here].max())}"
            yield name, c, span, count, predicted[here].mean().item(), rate, *wilson_interval(rate, count)


def main() -> None:
    """Print the table, and how many predictions lie inside."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    arguments = parser.parse_args()
    first, second = read_calibration(arguments.first), read_calibration(arguments.second)
    inside = total = 0
    print("comparison                 c  tokens    responses  predicted  measured")
    for one, other in zip(first.comparisons, second.comparisons, strict=True):
        if not one.sigma[0]:
            continue
        for name, c, span, count, predicted, rate, low, high in rows(
            f"{one.kind}, {one.precision}", one.noise(), other.noise()
        ):
            good = low <= predicted <= high
            inside, total = inside + good, total + 1
            print(
                f"{name:<22} {c:>6.3f}  {span:<9} {count:>8}   {predicted:>8.1%}   {rate:>6.1%} "
                f"[{low:.1%}, {high:.1%}]{'' if good else ' *'}"
            )
    print(f"{inside} of {total} predictions lie inside the interval of what was measured")


if __name__ == "__main__":
    main()
