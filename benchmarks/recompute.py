"""Two tables of docs/evidence.md again, from kept records, with numpy and nothing of ours.

    python benchmarks/recompute.py benchmarks/results/evidence_ledger.npz

Of every arm: how many of the responses with an advantage were clipped, short and long; and LRE of what was
clipped, over 8 length bins, within signs of A, and within optimizer steps. Means over seeds.
"""

import argparse

import numpy as np

SHORT = 40


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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    for arm, row in figures(parser.parse_args().file).items():
        print(f"{arm:<14}", "  ".join(f"{value:.3f}" for value in row))
