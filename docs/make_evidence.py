"""Writes docs/evidence.md from its template and benchmarks/results: ``python docs/make_evidence.py``.

Every figure and every verdict of the page is computed here from what a command wrote there.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "docs")]
from evidence_density import density, drift, filler  # noqa: E402
from evidence_long import long_responses, rows  # noqa: E402

from claims import ARMS, lines, read_claims  # noqa: E402

TARGET = Path(__file__).with_name("evidence.md")
RESULTS = ROOT / "benchmarks/results"

MAKE_SUM = "sqrt measured constant gspo luspo quarter half double quadruple none dual_clip drift cppo pnpo"
LEDGER = "sqrt none random constant linear"
GROWTH = "sqrt constant linear"
LEDGER_COLUMNS = {
    "lre_within_sign": "LRE",
    "accuracy/short_held_out": "accuracy, short",
    "accuracy/long_held_out": "accuracy, long",
}
GROWTH_COLUMNS = {
    "clipped_more": "change",
    "lre_within_sign": "LRE",
    "accuracy/long_held_out": "accuracy, long",
}
WORDS = {"words": "16", "words_fresh": "2", "words_bf16": "16, bf16"}
REWARD_COLUMNS = {
    "lre_within_sign": "LRE",
    "reward_last": "reward",
}
COVERED = [("accuracy", "ours"), ("accuracy", "paired"), ("lre", "mean"), ("lre", "max")]
COVERED += [("parts", "noise"), ("parts", "signal")]

TEMPLATE = Path(__file__).with_name("evidence.md.in")


def read(name: str) -> dict[str, Any]:
    """A file of figures."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def render() -> str:
    """The page."""
    bands, ledger, growth = (read(f"evidence_{part}") for part in ("bands", "ledger", "ledger_growth"))
    make_sum = bands["arms"] | read("evidence_widths")["arms"] | read("evidence_losses")["arms"]
    covered = read("interval_coverage")
    wrong = [*covered["verdicts"].values()]
    return TEMPLATE.read_text(encoding="utf-8").format(
        cpu=bands["machine"]["cpu"],
        torch=bands["machine"]["torch"],
        mcore=bands["machine"]["megatron-core"],
        claims=lines(read_claims()),
        ledger=table(ledger["arms"], LEDGER, LEDGER_COLUMNS),
        growth=table(
            growth["arms"], GROWTH, GROWTH_COLUMNS, {"first": first_rates("evidence_ledger_growth")}
        ),
        growth_steps=growth["sweep"]["keys"]["run"]["steps"],
        growth_lengths="{:.0f} to {:.0f}".format(*growth_lengths(growth)),
        ledger_seeds=len(ledger["sweep"]["seeds"]),
        ledger_arms=len(LEDGER.split()),
        ledger_needed=seeds_needed(ledger, "constant", "sqrt", "accuracy/long_held_out", 0.02),
        coverage_trials=f"{4 * covered['trials']:,}",
        covered=coverage(covered, *COVERED),
        covered_naively=coverage(covered, ("accuracy", "by response")),
        false_differences=f"{wrong[0]:.1%}",
        false_equalities=f"{wrong[1]:.1%}",
        found_equal=f"{wrong[2]:.0%}",
        make_sum=table(make_sum, MAKE_SUM, REWARD_COLUMNS),
        bands_seeds=len(bands["sweep"]["seeds"]),
        words=words_table(),
        **density(read("evidence_density")),
        **filler(**{kind: read(f"evidence_filler_{kind}") for kind in ("certain", "uncertain")}),
        **drift(read("evidence_drift")),
        exponents="{:.2f} to {:.2f}".format(*exponents(bands)),
        **long_responses(read("long_responses")),
    )


def table(
    arms: Mapping[str, Any],
    names: str,
    columns: Mapping[str, str],
    more: Mapping[str, Mapping[str, str]] | None = None,
) -> str:
    """By arm the share clipped, more columns (head → arm → cell), and means over seeds."""
    more = more or {}
    body = []
    for arm in names.split():
        cells = [f"{arms[arm]['clipped']['value']:.1%}", *(column[arm] for column in more.values())]
        body.append([ARMS[arm], *cells, *(mean(arms[arm].get(key)) for key in columns)])
    return rows(["", "clipped", *more, *columns.values()], body)


def words_table() -> str:
    """The sweeps on lists of words, one below the other."""
    lines = [f"{'steps':<10}{'':<12}{'clipped':>8}{'LRE':>16}{'reward':>16}"]
    for part, name in WORDS.items():
        for number, (arm, means) in enumerate(read(f"evidence_{part}")["arms"].items()):
            cells = "".join(f"{mean(means[key]):>16}" for key in REWARD_COLUMNS)
            begin = f"{'' if number else name:<10}{ARMS[arm]:<12}"
            lines.append(f"{begin}{means['clipped']['value']:>8.1%}{cells}")
    return "\n".join(lines)


def seeds_needed(found: Mapping[str, Any], arm: str, less: str, figure: str, margin: float) -> int:
    """For two arms with this spread to be found within the margin four times in five, if they are equal."""
    gaps = np.subtract(by_seed(found, arm, figure), by_seed(found, less, figure))
    return math.ceil(((stats.norm.ppf(0.95) + stats.norm.ppf(0.9)) * gaps.std(ddof=1) / margin) ** 2)


def coverage(found: Mapping[str, Any], *kinds: tuple[str, str]) -> str:
    """Least and largest share of samples in which an interval held the truth, over the populations."""
    shares = [one[key] for kind, key in kinds for one in found[kind].values()]
    return f"{min(shares):.1%} to {max(shares):.1%}"


def exponents(found: Mapping[str, Any]) -> tuple[float, float]:
    """The least and the largest exponent that the seeds measured."""
    values = [run["exponent"] for run in of_arm(found, "measured")]
    return min(values), max(values)


def growth_lengths(found: Mapping[str, Any]) -> tuple[float, float]:
    """Mean length of a response in the first steps and in the last, of √L."""
    return found["arms"]["sqrt"]["length_first"]["value"], found["arms"]["sqrt"]["length_last"]["value"]


def first_rates(name: str) -> dict[str, str]:
    """Share clipped in the first quarter of the steps, by arm."""
    with np.load(RESULTS / f"{name}.npz") as file:
        first = np.isin(file["step"], np.array_split(np.unique(file["step"]), 4)[0])
        judged = first & (file["advantage"] != 0)
        return {
            arm: f"{file['clipped'][judged & (file['arm'] == arm)].mean():.1%}"
            for arm in np.unique(file["arm"]).tolist()
        }


def mean(found: Mapping[str, float] | None) -> str:
    """``0.024 ± 0.003``; nothing where there is no such figure."""
    if found is None or found["value"] is None:
        return ""
    value, half = found["value"], found["half_width"]
    return f"{value:.1f} ± {half:.1f}" if abs(value) >= 10 else f"{value:.3f} ± {half:.3f}"


def of_arm(main: Mapping[str, Any], arm: str) -> list[Mapping[str, Any]]:
    """Its runs, by seed."""
    return [run for run in main["runs"] if run["arm"] == arm]


def by_seed(main: Mapping[str, Any], arm: str, figure: str) -> list[float]:
    """One value for each seed."""
    return [run[figure] for run in of_arm(main, arm)]


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
