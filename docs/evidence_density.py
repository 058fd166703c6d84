"""The sections of docs/evidence.md on the density of uncertain tokens and on the drift, from results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from evidence_long import rows

from claims import DENSITY_ARMS, ROOT, lines, read_claims, setting_of

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
    body = []
    for arm in SHOWN:
        cells = []
        for setting in SETTINGS:
            runs = [run for run in found["runs"] if run["arm"] == f"{setting}/{arm}"]
            figures = [[run["accuracy/long"], run["clipped_late"]] for run in runs]
            cells.append("{:.3f} ({:.0%})".format(*np.mean(figures, 0)))
        body.append([DENSITY_ARMS[arm], *cells])
    return rows(["", *map(setting_of, SETTINGS)], body)


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
