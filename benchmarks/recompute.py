"""Tables of docs/evidence.md again, from kept records, with numpy and nothing of ours.

    python benchmarks/recompute.py benchmarks/results/evidence_ledger.npz
    python benchmarks/recompute.py benchmarks/results/evidence_density.npz
    python benchmarks/recompute.py benchmarks/results/evidence_drift.npz
    python benchmarks/recompute.py benchmarks/results/evidence_filler_uncertain.npz

Of every arm of the ledger: how many of the responses with an advantage were clipped, short and long; and LRE
of what was clipped, over 8 length bins, within signs of A, and within optimizer steps. Means over seeds.

Of every arm of density.py: accuracy at 1,024 tokens, mean over seeds; its difference from √L; the chance of
so large a one if its sign were random in every seed (100,000 draws); and of seed 1 the share that the band
clipped in the last four rollouts, from S, A and c.

Of every arm of drift.py: accuracy at 4,096 tokens, mean over seeds; its difference from drift = none, and the
chance of it as above; and of the first seed, from S, A, c and drift, of the longest third: the shares below
and above the band, and the shares clipped of A > 0 and A < 0.

Of every arm of the ledger with filler, from counts by step, means over seeds: the clip rate in the first and
the last quarter of the steps, and the change; the change less that of √L, and the share of all signs of these
differences whose mean is as large; and of the first seed, from S, A, c and L, the last quarter's rate.
"""

import argparse
import json
from pathlib import Path

import numpy as np

SHORT = 40
LATE = np.array([800, 1024, 1024, 1024])
"""Tokens of a response in the last rollouts of density.py."""
LONGEST = 4096
"""Tokens of the longest responses of drift.py."""


EXPONENTS = {"sqrt": 0.5, "again": 0.5, "constant": 0.0, "linear": 1.0}
"""Of the widths of the ledger with filler."""


def lre(accepted, length, strata):
    """Σ_s p_s Σ_b p_b |a_b / ā − 1|: bins are quantiles of all lengths, equal lengths in one."""
    order = np.sort(length)
    edges = order[np.arange(1, 8) * len(length) // 8]
    bins = np.searchsorted(edges, length, side="right")
    total = weight = 0.0
    for stratum in np.unique(strata):
        own = strata == stratum
        mean = accepted[own].mean()
        if mean == 0:
            continue
        weight += own.sum()
        for bin in np.unique(bins[own]):
            here = own & (bins == bin)
            total += here.sum() * abs(accepted[here].mean() / mean - 1)
    return total / weight


def figures(path):
    """Arm → clipped short, clipped long, LRE, within a sign, within a step."""
    file = np.load(path)
    judged = file["advantage"] != 0
    column = {name: file[name][judged] for name in file.files}
    found = {}
    for arm in dict.fromkeys(column["arm"].tolist()):
        seeds = []
        for seed in np.unique(column["seed"][column["arm"] == arm]):
            own = (column["arm"] == arm) & (column["seed"] == seed)
            clipped, length, update = (column[name][own] for name in ("clipped", "length", "update"))
            short, sign = length <= SHORT, column["advantage"][own] > 0
            kept = ~clipped
            row = [clipped[short].mean(), clipped[~short].mean(), lre(kept, length, np.zeros(len(length)))]
            seeds.append([*row, lre(kept, length, sign), lre(kept, length, update)])
        found[arm] = np.mean(seeds, axis=0)
    return found


def accuracies(path, base):
    """Arm → accuracy, less that of the base in its setting, p."""
    random, accuracy, found = np.random.default_rng(0), {}, {}
    for run in json.loads(Path(path).with_suffix(".json").read_text())["runs"]:
        accuracy.setdefault(run["arm"], {})[run["seed"]] = run["accuracy/long"]
    for name, by_seed in accuracy.items():
        other = accuracy[f"{name.split('/')[0]}/{base}"]
        gaps = np.array([by_seed[seed] - other[seed] for seed in sorted(by_seed)])
        flipped = (random.choice([-1.0, 1.0], size=(100_000, len(gaps))) * gaps).mean(1)
        chance = (np.abs(flipped) >= abs(gaps.mean()) - 1e-12).mean()
        found[name] = [np.mean([*by_seed.values()]), gaps.mean(), chance]
    return found


def density(path):
    """Arm → accuracy, less √L, p, clipped late in seed 1."""
    file, found = np.load(path), {}
    for name, row in accuracies(path, "sqrt").items():
        setting, arm = name.split("/")
        sums, advantage, c = (file[f"{setting}.{arm}/{key}"] for key in ("sums", "advantages", "c"))
        edge = (c * LATE ** {"constant": 0.0, "linear": 1.0}.get(arm, 0.5))[:, None, None]
        sign = np.sign(advantage)[:, None, :]
        clipped = (sums * sign > edge) & (arm not in ("none", "bare"))
        shares = [clipped[i][:, sign[i, 0] != 0].mean() for i in range(len(LATE))]
        found[name] = np.array([*row, np.mean(shares)])
    return found


def drift(path):
    """Arm → accuracy, less none, p; of the first seed below, above, clipped of A > 0, of A < 0."""
    file, found = np.load(path), {}
    for name, row in accuracies(path, "none").items():
        key = name.replace("/", ".")
        sums, advantage, c, centre = (file[f"{key}/{part}"] for part in ("sums", "advantages", "c", "drift"))
        third = sums.shape[-1] // 3
        sums, advantage = (each[..., -third:].reshape(-1, third) for each in (sums, advantage))
        middle, half = centre.reshape(-1, 1) * LONGEST, c.reshape(-1, 1) * LONGEST**0.5
        below, above = sums < middle - half, sums > middle + half
        clipped = []
        for side, sign in ((above, 1), (below, -1)):
            mine = np.sign(advantage) == sign
            steps = mine.any(1)
            clipped.append(((side & mine).sum(1)[steps] / mine.sum(1)[steps]).mean())
        found[name] = np.array([*row, below.mean(), above.mean(), *clipped])
    return found


def filler(path):
    """Arm → clip rate first, last, change, less √L, p; last of the first seed, from S."""
    file = np.load(path)
    rates = {}
    for run, (arm, seed) in enumerate(zip(file["arms"].tolist(), file["seeds"].tolist(), strict=True)):
        own = file["run"] == run
        steps, clipped, judged = (file[name][own] for name in ("step", "clipped", "judged"))
        parts = [np.isin(steps, quarter) for quarter in np.array_split(steps, 4)]
        pair = [clipped[part].sum() / judged[part].sum() for part in (parts[0], parts[-1])]
        rates.setdefault(arm, {})[seed] = [*pair, pair[1] - pair[0]]
    found, first = {}, min(file["seeds"])
    signs = np.array(np.meshgrid(*[[-1, 1]] * len(rates["sqrt"]))).reshape(len(rates["sqrt"]), -1)
    for arm, by_seed in rates.items():
        gaps = np.array([by_seed[seed][2] - rates["sqrt"][seed][2] for seed in sorted(by_seed)])
        chance = (np.abs(gaps @ signs) >= abs(gaps.sum()) - 1e-12).mean()
        (run,) = np.flatnonzero((file["arms"] == arm) & (file["seeds"] == first))
        width = dict(zip(file["step"][file["run"] == run], file["c"][file["run"] == run], strict=True))
        own = (file["first/arm"] == arm) & (file["first/advantage"] != 0)
        step, sums, advantage, length = (
            file[f"first/{name}"][own] for name in ("step", "log_ratio_sum", "advantage", "length")
        )
        last = np.isin(step, np.array_split(sorted(width), 4)[-1])
        edge = np.array([width[one] for one in step[last]]) * length[last] ** EXPONENTS[arm]
        again = (sums[last] * np.sign(advantage[last]) > edge).mean()
        found[arm] = np.array([*np.mean([*by_seed.values()], 0), gaps.mean(), chance, again])
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file")
    name = parser.parse_args().file
    tables = {"evidence_density": density, "evidence_drift": drift}
    tables |= {"evidence_filler_certain": filler, "evidence_filler_uncertain": filler}
    table = tables.get(Path(name).stem, figures)
    for arm, row in table(name).items():
        print(f"{arm:<30}" if "/" in arm else f"{arm:<14}", "  ".join(f"{value:.3f}" for value in row))
