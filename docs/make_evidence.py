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
from evidence_long import long_responses, rows  # noqa: E402

from claims import read_claims  # noqa: E402
from claims import table as claims_table  # noqa: E402

TARGET = Path(__file__).with_name("evidence.md")
RESULTS = ROOT / "benchmarks/results"

BANDS = {
    "sqrt": "√L, c",
    "measured": "L^a, a measured",
    "noise_signal": "√(L + L²/L*)",
    "constant": "constant",
    "gspo": "GSPO",
    "luspo": "LUSPO: GSPO without 1/L",
}
WIDTHS = {
    "quarter": "√L, c / 4",
    "half": "√L, c / 2",
    "double": "√L, 2 c",
    "quadruple": "√L, 4 c",
    "none": "no clip",
    "dual_clip": "√L, length-fair dual clip",
    "drift": "√L, drift k3",
    "cppo": "CPPO",
    "pnpo": "PNPO",
}
BAND_COLUMNS = {
    "clipped": "clipped",
    "lre_signed": "LRE clipped",
    "lre_within_sign": "within a sign",
    "ess": "ESS",
    "reward_last": "reward",
    "accuracy_after": "held-out accuracy",
    "length_last": "response length",
}
LEDGER = {
    "sqrt": "√L",
    "none": "no clip",
    "random": "as many at random",
    "constant": "constant",
    "linear": "L",
    "noise_signal": "√(L + L²/L*)",
}
LEDGER_COLUMNS = {
    "clipped": "clipped",
    "accuracy/short_held_out": "accuracy, short",
    "accuracy/long_held_out": "accuracy, long",
    "ess": "ESS",
    "lre_signed": "LRE clipped",
    "lre_within_sign": "within a sign",
    "lre_within_update": "within a step",
    "by_sign": "between signs",
    "by_update": "between steps",
}
GROWTH_COLUMNS = {
    "clipped": "clipped",
    "clipped_more": "more in the last quarter",
    "accuracy/short_held_out": "accuracy, short",
    "accuracy/long_held_out": "accuracy, long",
    "ess": "ESS",
}
WORDS_COLUMNS = {
    "clipped": "clipped",
    "lre_signed": "LRE clipped",
    "lre_within_sign": "within a sign",
    "ess": "ESS",
    "reward_last": "reward",
    "accuracy/short_held_out": "accuracy, short",
    "accuracy/long_held_out": "accuracy, long",
}
SHORT = 40
"""Tokens of a short response of the ledger at most."""

TEMPLATE = Path(__file__).with_name("evidence.md.in")


def read(name: str) -> dict[str, Any]:
    """A file of figures."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def render() -> str:
    """The page."""
    bands, ledger, growth = (read(f"evidence_{part}") for part in ("bands", "ledger", "ledger_growth"))
    widths, losses = read("evidence_widths"), read("evidence_losses")
    covered = read("interval_coverage")
    wrong = [*covered["verdicts"].values()]
    return TEMPLATE.read_text(encoding="utf-8").format(
        cpu=bands["machine"]["cpu"],
        torch=bands["machine"]["torch"],
        mcore=bands["machine"]["megatron-core"],
        preregistered=claims_table(read_claims()),
        ledger=table(ledger["arms"], LEDGER, LEDGER_COLUMNS),
        ledger_families=by_family(ledger),
        growth=table(growth["arms"], {arm: LEDGER[arm] for arm in growth["arms"]}, GROWTH_COLUMNS),
        growth_steps=growth["sweep"]["keys"]["run"]["steps"],
        growth_lengths="{:.0f} to {:.0f}".format(*growth_lengths(growth)),
        growth_spikes=spikes(growth),
        ledger_seeds=len(ledger["sweep"]["seeds"]),
        ledger_arms=len(ledger["arms"]),
        ledger_crossovers=crossovers(ledger),
        ledger_needed=seeds_needed(ledger, "constant", "sqrt", "accuracy/long_held_out", 0.02),
        coverage_trials=f"{4 * covered['trials']:,}",
        coverage=coverage(covered),
        false_differences=f"{wrong[0]:.1%}",
        false_equalities=f"{wrong[1]:.1%}",
        found_equal=f"{wrong[2]:.0%}",
        bands=table(bands["arms"], BANDS, BAND_COLUMNS),
        bands_seeds=len(bands["sweep"]["seeds"]),
        **{part: words_table(part) for part in ("words", "words_fresh", "words_bf16")},
        widths=table(widths["arms"] | losses["arms"], WIDTHS, BAND_COLUMNS),
        exponents=", ".join(f"{run['exponent']:.2f}" for run in of_arm(bands, "measured")),
        bands_crossovers=crossovers(bands),
        **long_responses(read("long_responses")),
    )


def table(arms: Mapping[str, Any], names: Mapping[str, str], columns: Mapping[str, str]) -> str:
    """By arm the means over seeds."""
    lines = [f"| | {' | '.join(columns.values())} |", "|---" * (1 + len(columns)) + "|"]
    for arm, name in names.items():
        lines.append(f"| {name} | {' | '.join(mean(arms[arm].get(key)) for key in columns)} |")
    return "\n".join(lines)


def words_table(part: str) -> str:
    """Of a sweep on lists of words."""
    arms = read(f"evidence_{part}")["arms"]
    return table(arms, {arm: LEDGER[arm] for arm in arms}, WORDS_COLUMNS)


def seeds_needed(found: Mapping[str, Any], arm: str, less: str, figure: str, margin: float) -> int:
    """For two arms with this spread to be found within the margin four times in five, if they are equal."""
    gaps = np.subtract(by_seed(found, arm, figure), by_seed(found, less, figure))
    return math.ceil(((stats.norm.ppf(0.95) + stats.norm.ppf(0.9)) * gaps.std(ddof=1) / margin) ** 2)


def coverage(found: Mapping[str, Any]) -> str:
    """Shares of samples in which intervals held the truth: a table for each kind of figure."""
    kinds = {
        "accuracy": {"by response": "as if independent", "ours": "ours", "paired": "ours, of a gain"},
        "lre": {"mean": "LRE mean", "max": "LRE max"},
        "parts": {"noise": "noise of S", "signal": "signal of S"},
    }
    return "\n\n".join(
        rows(
            [kind, *labels.values()],
            [[name, *(f"{shares[key]:.1%}" for key in labels)] for name, shares in found[kind].items()],
        )
        for kind, labels in kinds.items()
    )


def crossovers(found: Mapping[str, Any]) -> str:
    """The L* that the seeds measured."""
    values = [run["crossover"] for run in of_arm(found, "noise_signal")]
    known = [value for value in values if value is not None]
    none = f"none in {len(values) - len(known)} of {len(values)} seeds"
    return f"from {min(known):,.0f} to {max(known):,.0f} tokens, and {none}"


def growth_lengths(found: Mapping[str, Any]) -> tuple[float, float]:
    """Mean length of a response in the first steps and in the last, of √L."""
    return found["arms"]["sqrt"]["length_first"]["value"], found["arms"]["sqrt"]["length_last"]["value"]


def spikes(found: Mapping[str, Any]) -> str:
    """Median over seeds of the largest gradient norm of a run over its median, by arm."""
    by_arm = {arm: np.median(by_seed(found, arm, "grad_norm_spike")) for arm in found["arms"]}
    return ", ".join(f"{LEDGER[arm]} {value:.1f}" for arm, value in by_arm.items())


def by_family(found: Mapping[str, Any]) -> str:
    """Share of the responses with an advantage that is clipped, in either family of the ledger."""
    body = []
    for arm, name in LEDGER.items():
        rates = [one["value"] for one in found["arms"][arm]["clipped_rates"]]
        families = ([], [])
        for length, rate in zip(found["lengths"], rates, strict=True):
            families[length > SHORT].append(rate)
        body.append([name, *(f"{sum(family) / len(family):.0%}" for family in families)])
    return rows(["clipped, of A ≠ 0", "short", "long"], body)


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
