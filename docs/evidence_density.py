"""The section of docs/evidence.md on the density of uncertain tokens, from its results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from evidence_long import rows

from claims import ROOT, judge, read_claims, tested

ARMS = {
    "sqrt": "√L",
    "narrow": "√L, c/4",
    "measured": "√L, again",
    "free": "√L, free",
    "constant": "constant",
    "linear": "L",
    "none": "no band",
    "bare": "no clip",
}
SETTINGS = [
    f"{kind}-{rate}{temper}"
    for temper in ("", "-tempered")
    for rate in ("0.03", "0.01")
    for kind in ("dense", "fixed")
]
RELATIONS = {"above": ">", "below": "<", "equal": "≈"}


def density(found: Mapping[str, Any]) -> dict[str, str]:
    """What the section of that name has."""
    seeds = {run["seed"] for run in found["runs"]}
    return {"density": table(found), "density_claims": claims(), "density_seeds": str(len(seeds))}


def table(found: Mapping[str, Any]) -> str:
    """By arm and setting the accuracy at the longest length, and the share that the band clips at the end."""
    body = []
    for arm, label in ARMS.items():
        cells = []
        for setting in SETTINGS:
            runs = [run for run in found["runs"] if run["arm"] == f"{setting}/{arm}"]
            figures = [[run["accuracy/long"], run["clipped_late"]] for run in runs]
            cells.append("{:.3f} ({:.0%})".format(*np.mean(figures, 0)) if figures else "")
        body.append([label, *cells])
    return rows(["", *map(words, SETTINGS)], body)


def claims() -> str:
    """The registered claims, a line each."""
    given = read_claims(ROOT / "benchmarks/evidence/claims_density.toml")
    tests = tested(given)
    lines = []
    for claim, test, verdict in zip(given, tests, judge(given, tests), strict=True):
        assert test is not None
        (setting, arm), (_, less) = claim.arm.split("/"), claim.less.split("/")
        figure = "clipped at the end" if claim.figure == "clipped_late" else "accuracy"
        size = f", by > {claim.margin:g}" if claim.beyond else f", margin {claim.margin:g}"
        what = f"{words(setting)}: {figure}, {ARMS[arm]} {RELATIONS[claim.test]} {ARMS[less]}{size}"
        lines.append(f"{what:<75} {test.value:+.3f} ± {test.half_width:.3f}  {verdict}")
    return "\n".join(lines)


def words(setting: str) -> str:
    """``dense, .03``; with a temper, ``dense, .03, ½``."""
    return setting.replace("-tempered", ", ½").replace("-0", ", ")
