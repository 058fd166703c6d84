"""How often a 95 % interval of an evaluation holds the truth, and what it costs.

    python benchmarks/interval_coverage.py

Populations of problems are known: a problem's chance is drawn from a Beta distribution, its responses from
that chance. Compared are the plain percentile bootstrap over problems, the interval that is used, and the
normal interval that takes all responses to be independent; paired is the used one, of the gain of a second
evaluation in which a problem was learned by a share that is drawn from Beta(0.3, 2).
"""

from __future__ import annotations

import math
import time

import numpy as np

from machine import options_of
from megatron_fspo.evaluation.intervals import interval_of_means

POPULATIONS = [(9, (2.0, 1.0)), (30, (2.0, 2.0)), (30, (0.3, 2.0)), (30, (0.1, 1.0)), (100, (0.3, 3.0))]
SAMPLES = 16
GAIN = (0.3, 2.0)


def coverage(problems: int, shape: tuple[float, float], trials: int, resamples: int) -> dict[str, float]:
    """By interval, the share of trials in which it held the mean of the population."""
    random = np.random.default_rng(problems)
    truth = shape[0] / sum(shape)
    held = dict.fromkeys(("by response", "percentile", "BCa, widened", "paired"), 0)
    for trial in range(trials):
        chances = random.beta(*shape, size=problems)
        values = random.binomial(SAMPLES, chances) / SAMPLES
        mean = values.mean()
        half = 1.96 * math.sqrt(mean * (1 - mean) / (problems * SAMPLES))
        held["by response"] += abs(mean - truth) <= half
        drawn = values[random.integers(problems, size=(resamples, problems))].mean(1)
        low, high = np.quantile(drawn, (0.025, 0.975))
        held["percentile"] += low <= truth <= high
        (ours,) = interval_of_means({"s": values[:, None]}, seed=trial, resamples=resamples)
        held["BCa, widened"] += ours.low <= truth <= ours.high
        learned = chances + (1 - chances) * random.beta(*GAIN, size=problems)
        gained = random.binomial(SAMPLES, learned) / SAMPLES - values
        (ours,) = interval_of_means({"s": gained[:, None]}, seed=trial, resamples=resamples)
        held["paired"] += ours.low <= (1 - truth) * GAIN[0] / sum(GAIN) <= ours.high
    return {name: float(count) / trials for name, count in held.items()}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--resamples", type=int, default=1000)
    args = parser.parse_args()
    for problems, shape in POPULATIONS:
        found = coverage(problems, shape, args.trials, args.resamples)
        shares = "  ".join(f"{name} {share:.1%}" for name, share in found.items())
        print(f"{problems:4} problems, Beta{shape}: {shares}", flush=True)
    values = np.random.default_rng(0).random((500, 20))
    began = time.process_time()
    interval_of_means({"s": values})
    print(f"500 problems x 20 figures x 10,000 resamples: {time.process_time() - began:.2f} s of CPU time")


if __name__ == "__main__":
    main()
