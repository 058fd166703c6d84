"""Writes docs/evidence.md from its template and benchmarks/results: ``python docs/make_evidence.py``.

Every figure and every verdict of the page is computed here from what a command wrote there.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "docs")]
from evidence_long import DIFFERENCES, long_responses, ranged, rows  # noqa: E402

from claims import holm, read_claims  # noqa: E402
from claims import table as claims_table  # noqa: E402

TARGET = Path(__file__).with_name("evidence.md")
RESULTS = ROOT / "benchmarks/results"

SUPPORTED, NOT, UNTESTED = "**supported**", "**not supported**", "**not testable here**"
NAMES = {"measured": "FSPO, a measured", "fspo": "FSPO, a = ½", "rloo": "RLOO", "gspo": "GSPO"}
VARIATIONS = {
    "half": "c / 2",
    "base": "c = 0.045, length-fair dual clip, no drift",
    "double": "2 c",
    "quadruple": "4 c",
    "no-dual-clip": "no dual clip",
    "drift": 'drift = "k3"',
}
COLUMNS = {
    "out_of_band": "outside",
    "lre_mean": "LRE mean",
    "lre_max": "LRE max",
    "lre_null": "by chance (mean)",
    "ess": "ESS",
    "reward_last": "reward",
    "accuracy_change": "held-out accuracy, gained",
    "length_last": "response length",
}

PAIRED = {
    "lre_mean": "LRE mean",
    "lre_max": "LRE max",
    "ess": "ESS",
    "reward_last": "reward",
    "accuracy_after": "held-out accuracy",
    "length_last": "response length",
}
"""Figures whose differences from the measured arm are printed, and corrected together."""

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
SHORT = 40
"""Tokens of a short response of the ledger at most."""

TEMPLATE = Path(__file__).with_name("evidence.md.in")


def read(name: str) -> dict[str, Any]:
    """A file of figures."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def render() -> str:
    """The page."""
    main, variations, real = (read(f"evidence_{part}") for part in ("make_sum", "variations", "smollm2"))
    long, ledger, growth = read("long_responses"), read("evidence_ledger"), read("evidence_ledger_growth")
    covered = read("interval_coverage")
    wrong = [*covered["verdicts"].values()]
    sweep, arms = main["sweep"], main["arms"]
    pretrained, pretrained_runs = real["sweep"], of_arm(real, "measured")
    runs = of_arm(main, "measured")
    return TEMPLATE.read_text(encoding="utf-8").format(
        cpu=main["machine"]["cpu"],
        torch=main["machine"]["torch"],
        mcore=main["machine"]["megatron-core"],
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
        claims="\n".join(claims(main, variations, real, long)),
        seeds=len(sweep["seeds"]),
        arms=len(arms),
        steps=30,
        corrected=len(p_values(main)),
        calibrate=sweep["arms"]["measured"]["loss"]["calibrate"],
        records=f"{round(runs[0]['records'], -3):,}",
        make_sum=table(arms, NAMES),
        exponents=", ".join(f"{run['exponent']:.2f}" for run in runs),
        differences=differences(main),
        **long_responses(long),
        variation_seeds=len(variations["sweep"]["seeds"]),
        variation_arms=len(variations["arms"]),
        variations=table(variations["arms"], VARIATIONS),
        pretrained=table(real["arms"], NAMES),
        pretrained_seeds=len(pretrained["seeds"]),
        pretrained_arms=len(real["arms"]),
        pretrained_steps=pretrained["keys"]["run"]["steps"],
        pretrained_calibrate=pretrained["arms"]["measured"]["loss"]["calibrate"],
        pretrained_differences=differences(real),
        pretrained_exponents=", ".join(f"{run['exponent']:.2f}" for run in pretrained_runs),
        pretrained_length_first=f"{real['arms']['measured']['length_first']['value']:.0f}",
        pretrained_length_last=f"{real['arms']['measured']['length_last']['value']:.0f}",
        pretrained_records="{} to {}".format(*extremes([run["records"] for run in real["runs"]])),
    )


def table(arms: Mapping[str, Any], names: Mapping[str, str], columns: Mapping[str, str] = COLUMNS) -> str:
    """By arm the means over seeds."""
    lines = [f"| | {' | '.join(columns.values())} |", "|---" * (1 + len(columns)) + "|"]
    for arm, name in names.items():
        lines.append(f"| {name} | {' | '.join(mean(arms[arm][key]) for key in columns)} |")
    return "\n".join(lines)


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


def mean(found: Mapping[str, float]) -> str:
    """``0.024 ± 0.003``"""
    value, half = found["value"], found["half_width"]
    return f"{value:.1f} ± {half:.1f}" if abs(value) >= 10 else f"{value:.3f} ± {half:.3f}"


def of_arm(main: Mapping[str, Any], arm: str) -> list[Mapping[str, Any]]:
    """Its runs, by seed."""
    return [run for run in main["runs"] if run["arm"] == arm]


def extremes(values: Sequence[int]) -> tuple[int, int]:
    """The least and the largest."""
    return min(values), max(values)


def by_seed(main: Mapping[str, Any], arm: str, figure: str) -> list[float]:
    """One value for each seed."""
    return [run[figure] for run in of_arm(main, arm)]


def below(main: Mapping[str, Any], arm: str, others: Sequence[str], figure: str) -> int:
    """In how many seeds the arm's figure is below those of all the others."""
    columns = [by_seed(main, other, figure) for other in others]
    mine = by_seed(main, arm, figure)
    return sum(value < min(rest) for value, *rest in zip(mine, *columns, strict=True))


def differences(main: Mapping[str, Any]) -> str:
    """Of the other arms, less the measured one; a star where Holm's correction leaves the difference."""
    clear = differing(p_values(main))
    lines = [f"| | {' | '.join(PAIRED.values())} |", "|---" * (1 + len(PAIRED)) + "|"]
    for arm, found in main["differences"].items():
        cells = (mean(found[key]) + " *" * ((key, arm, "measured") in clear) for key in PAIRED)
        lines.append(f"| {NAMES[arm]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def p_values(main: Mapping[str, Any]) -> dict[tuple[str, str, str], float]:
    """Of paired two-sided t tests, by figure and two arms: all differences that are printed or claimed."""
    compared = [(key, arm, "measured") for arm, key in product(main["differences"], PAIRED)]
    compared += [("lre_mean", "rloo", "fspo"), ("lre_mean", "gspo", "fspo")]
    return {
        (key, arm, other): float(stats.ttest_rel(by_seed(main, arm, key), by_seed(main, other, key)).pvalue)
        for key, arm, other in compared
    }


def differing(p: Mapping[tuple[str, str, str], float]) -> set[tuple[str, str, str]]:
    """Those that differ, at 5% for all of them together."""
    return {name for name, clear in zip(p, holm([*p.values()]), strict=True) if clear}


def claims(
    main: Mapping[str, Any], variations: Mapping[str, Any], real: Mapping[str, Any], long: Mapping[str, Any]
) -> list[str]:
    """Rows of the first table."""
    seeds, arms = len(main["sweep"]["seeds"]), main["arms"]
    others = ("rloo", "gspo")
    clear = differing(p_values(main))
    lines = []

    def add(claim: str, figure: str, verdict: str) -> None:
        lines.append(f"| {claim} | {figure} | {verdict} |")

    def lre(*names: str) -> str:
        return ", ".join(f"{NAMES[name]} {mean(arms[name]['lre_mean'])}" for name in names)

    def against(mine: str, *than: str) -> str:
        words = ((SUPPORTED if ("lre_mean", arm, mine) in clear else NOT, NAMES[arm]) for arm in than)
        return ", ".join(f"{verdict} against {name}" for verdict, name in words)

    count = below(main, "fspo", others, "lre_mean")
    add(
        "At a matched share outside, who is outside depends less on length for √L than for a constant band "
        "(RLOO) and one on the mean (GSPO); make-sum",
        f"LRE mean: {lre('fspo', *others)}; below both in {count} of {seeds} seeds",
        against("fspo", *others),
    )
    count = below(main, "measured", ("fspo", *others), "lre_mean")
    add(
        "With a measured exponent it depends less on length than with ½, RLOO and GSPO; make-sum",
        f"{lre('measured')}; below all three in {count} of {seeds} seeds, below RLOO and GSPO in "
        f"{below(main, 'measured', others, 'lre_mean')}",
        against("measured", "fspo", *others),
    )
    for what, key in (
        ("held-out accuracy", "accuracy_after"),
        ("reward on the training prompts", "reward_last"),
    ):
        gains = {arm: main["differences"][arm][key] for arm in main["differences"]}
        add(
            f"A band that depends less on length gives higher {what}; make-sum",
            "less FSPO with a measured: "
            + ", ".join(
                f"{NAMES[arm]} {mean(gain)} (above in {gain['above']} of {seeds} seeds)"
                for arm, gain in gains.items()
            ),
            SUPPORTED
            if all((key, arm, "measured") in clear and gains[arm]["value"] < 0 for arm in others)
            else NOT,
        )
    slower, shorter = (main["differences"]["gspo"][key] for key in ("reward_last", "length_last"))
    add(
        "At the share outside of FSPO, GSPO learns more slowly and shortens responses; make-sum. It also "
        "weighs a response by 1/L: what that does and what its clipping does are not separated here",
        f"less FSPO with a measured: reward {mean(slower)}, response length {mean(shorter)}",
        SUPPORTED if {(key, "gspo", "measured") for key in ("reward_last", "length_last")} <= clear else NOT,
    )
    pairs = zip(*(by_seed(variations, arm, "lre_mean") for arm in ("base", "no-dual-clip")), strict=True)
    gaps = ", ".join(f"{with_clip - without:+.3f}" for with_clip, without in pairs)
    add(
        "The length-fair dual clip leaves clipping as even as it is",
        f"LRE mean with it, less without, by seed: {gaps}; too few seeds to say equal",
        UNTESTED,
    )
    mine, seeds = mean(real["arms"]["measured"]["lre_mean"]), len(real["sweep"]["seeds"])
    rest = ", ".join(f"{NAMES[arm]} {mean(real['arms'][arm]['lre_mean'])}" for arm in ("fspo", *others))
    chance = mean(real["arms"]["measured"]["lre_null"])
    count = below(real, "measured", ("fspo", *others), "lre_mean")
    add(
        "The same with SmolLM2-135M on arithmetic, whose answers grow short",
        f"{NAMES['measured']} {mine}, {rest}; by chance {chance}; "
        f"below all three in {count} of {seeds} seeds",
        SUPPORTED if count == seeds else NOT,
    )
    found = long["differences"]
    noise, *moved = (found[name]["within"] for name in DIFFERENCES)
    root = noise["interval"][0] <= 0.5 <= noise["interval"][1]
    faster = all(one["interval"][0] > 0.5 for one in moved)
    add(
        "Along a response S of noise grows as √L, and what training moves faster; SmolLM2, up to "
        f"{noise['to']:,} tokens",
        "exponents: "
        + ", ".join(f"{DIFFERENCES[name]} {ranged(found[name]['within'], '.2f')}" for name in DIFFERENCES),
        SUPPORTED if root and faster else NOT,
    )
    add(
        "From short responses to long ones S of noise grows as √L; the same",
        f"exponent of precision over responses {ranged(found['noise']['exponent'], '.2f')}",
        SUPPORTED
        if found["noise"]["exponent"]["interval"][0] <= 0.5 <= found["noise"]["exponent"]["interval"][1]
        else NOT,
    )
    checks = [one for name in DIFFERENCES for one in found[name]["checks"]]
    inside = sum(one["difference"][0] <= 0 <= one["difference"][1] for one in checks)
    halves = sorted((one["difference"][1] - one["difference"][0]) / 2 for one in checks)
    flat = sum(
        low <= long["outside"] <= high for low, high in (one["measured"]["interval"] for one in checks)
    )
    add(
        "Noise and signal, by the halves of the responses, predict the share outside by length; the same",
        f"measured less predicted: the interval holds 0 in {inside} of {len(checks)} bins, half its width is "
        f"{halves[0]:.0%} to {halves[-1]:.0%}; {long['outside']:.0%} in every bin would fit {flat} of them",
        UNTESTED,
    )
    for what, names in (("rounding", ("noise",)), ("updates", ("one", "three"))):
        above = {loss: [found[name]["losses"][loss]["above_measured"] for name in names] for loss in others}
        add(
            f"At the same share outside, of S that {what} moved, who is outside depends less on length for "
            "FSPO with a measured exponent than for RLOO and GSPO; the same",
            f"LRE mean above it, {', '.join(DIFFERENCES[name] for name in names)}: "
            + "; ".join(
                f"{NAMES[loss]} {', '.join(ranged(one, '.3f') for one in some)}"
                for loss, some in above.items()
            ),
            SUPPORTED if all(one["interval"][0] > 0 for some in above.values() for one in some) else NOT,
        )
    add(
        "Accuracy on MATH500, AMC23 and AIME with Qwen3-1.7B and 8B; RLOO's responses explode in length",
        "no GPU has run this code",
        UNTESTED,
    )
    return lines


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
