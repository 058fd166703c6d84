"""The sections of docs/evidence.md on the density of uncertain tokens, in a table and in the ledger, and on
the drift, from results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import recompute
from claims import ARMS, DENSITY_ARMS, ROOT, compare, lines, read_claims, setting_of

SETTINGS = ("dense-0.03", "dense-0.01", "fixed-0.03", "fixed-0.01")
SHOWN = ("sqrt", "narrow", "measured", "constant", "linear", "none")


def density(found: Mapping[str, Any]) -> dict[str, str]:
    """What the section of that name has."""
    claims = read_claims(ROOT / "benchmarks/evidence/claims_density.toml")
    three = (
        f"{DENSITY_ARMS[arm]} {rates(found, 'dense-0.03/' + arm)}" for arm in ("sqrt", "constant", "linear")
    )
    return {
        "density": table(found),
        "density_claims": lines(claims),
        "density_rates": ", ".join(three),
        "fixed_rate": rates(found, "fixed-0.03/sqrt"),
    }


def rates(found: Mapping[str, Any], arm: str) -> str:
    """Share that the band clips early → at the end."""
    runs = [run for run in found["runs"] if run["arm"] == arm]
    return " → ".join(f"{np.mean([run[f'clipped_{at}'] for run in runs]):.0%}" for at in ("early", "late"))


def table(found: Mapping[str, Any]) -> str:
    """By arm and setting the accuracy at the longest length, and the share that the band clips at the end."""
    body = [f"{'':<14}" + "".join(f"{setting_of(setting):>16}" for setting in SETTINGS)]
    for arm in SHOWN:
        cells = []
        for setting in SETTINGS:
            runs = [run for run in found["runs"] if run["arm"] == f"{setting}/{arm}"]
            figures = [[run["accuracy/long"], run["clipped_late"]] for run in runs]
            cells.append("{:.3f} ({:.0%})".format(*np.mean(figures, 0)))
        body.append(f"{DENSITY_ARMS[arm]:<14}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(body)


def filler(**parts: Mapping[str, Any]) -> dict[str, str]:
    """What the section on the ledger with filler has, of its two parts."""
    head = ("", "clipped first", "last", "reward", "long", "short")
    body = []
    for kind, found in parts.items():
        head = (f"{kind} filler", *head[1:])
        body.append(f"{head[0]:<18}" + "".join(f"{name:>15}" for name in head[1:]))
        kept = recompute.filler(ROOT / f"benchmarks/results/evidence_filler_{kind}.npz")
        for arm, means in found["arms"].items():
            first, last = kept[arm][:2]
            figures = ("reward_last", "accuracy/long_held_out", "accuracy/short_held_out")
            cells = [f"{first:.1%}", f"{last:.1%}"]
            cells += [f"{means[name]['value']:.3f} ± {means[name]['half_width']:.3f}" for name in figures]
            body.append(f"{ARMS[arm]:<18}" + "".join(f"{cell:>15}" for cell in cells))
    claims = read_claims(ROOT / "benchmarks/evidence/claims_filler.toml")
    costs = [compare(gaps(found, "reward_last"), 1.0) for found in parts.values()]
    common = {kind: compare(common_gaps(kind), 1.0) for kind in parts}
    return {
        "filler": "\n".join(body),
        "filler_claims": lines(claims),
        "filler_seeds": str(min(len(found["sweep"]["seeds"]) for found in parts.values())),
        "filler_costs": " and ".join(f"{-each.value:.3f} ± {each.half_width:.3f}" for each in costs),
        **{f"filler_{kind}": f"{each.value:+.3f} ± {each.half_width:.3f}" for kind, each in common.items()},
    }


def gaps(found: Mapping[str, Any], figure: str) -> list[float]:
    """Constant less √L, by seed."""
    arms = [[run[figure] for run in found["runs"] if run["arm"] == arm] for arm in ("constant", "sqrt")]
    return np.subtract(*arms).tolist()


def common_gaps(kind: str) -> list[float]:
    """Change of the clip rate from steps 6 to 8 to the last five, constant less √L, by seed."""
    with np.load(ROOT / f"benchmarks/results/evidence_filler_{kind}.npz") as file:
        arms, step, run = file["arms"], file["step"], file["run"]
        clipped, judged = file["clipped"], file["judged"]
    change = []
    for number in range(len(arms)):
        parts = [(run == number) & part for part in ((step > 5) & (step < 9), step > 15)]
        first, last = (clipped[part].sum() / judged[part].sum() for part in parts)
        change.append(last - first)
    both = [np.array(change)[arms == arm] for arm in ("constant", "sqrt")]
    return np.subtract(*both).tolist()


def drift(found: Mapping[str, Any]) -> dict[str, str]:
    """What the section on the drift has: by arm what happens at the longest length."""
    shown = ("clipped", "below", "above", "positive", "negative")
    head = ("", "clipped", "below", "above", "A > 0", "A < 0", "KL, nats", "accuracy")
    body = [f"{head[0]:<18}" + "".join(f"{name:>10}" for name in head[1:])]
    for arm in dict.fromkeys(run["arm"] for run in found["runs"]):
        runs = [run for run in found["runs"] if run["arm"] == arm]
        mean = {key: np.mean([run[key] for run in runs]) for key in runs[0] if key not in ("arm", "seed")}
        shares = "".join(f"{mean[key]:>10.1%}" for key in shown)
        setting, name = arm.split("/")
        label = f"{setting_of(setting)}: {name}"
        body.append(f"{label:<18}{shares}{mean['kl']:>10.2f}{mean['accuracy/long']:>10.3f}")
    claims = read_claims(ROOT / "benchmarks/evidence/claims_drift.toml")
    return {"drift": "\n".join(body), "drift_claims": lines(claims)}
