"""Verdicts on the claims of a file of ``benchmarks/evidence``, from the results of its runs.

    python benchmarks/claims.py
    python benchmarks/claims.py benchmarks/evidence/claims_density.toml

Claims are compared over seeds: paired t tests of a difference, one-sided ones of a difference beyond the
margin, and two one-sided ones of a difference within it (TOST). Over all claims of the file, also those whose
runs are not made, Holm's correction keeps the chance of any false difference below 5%, and likewise that of
any false "beyond" and of any false equality. Equality also needs a test that would find it four times in five
where it is so.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy import stats

from machine import ROOT, options_of

CLAIMS = ROOT / "benchmarks/evidence/claims.toml"
LEVEL, POWER = 0.05, 0.8
Verdict = Literal[
    "supported beyond the margin",
    "supported",
    "supported within the margin",
    "direction only",
    "no difference",
    "opposite",
    "different",
    "dead",
    "open",
    "not run",
]
"""Of a difference that is claimed: supported, if it is clear and has the sign; *direction only*, if the claim
is one of size (``beyond``) and that is not shown; opposite, if it is clear and has the other sign; no
difference, if it is within the margin. Of an equality: supported, if within the margin; different, if the
difference is clear. Dead: opposite or different by more than the margin. Open: none of it is shown."""
PARTS = {
    "ledger": "ledger",
    "ledger_growth": "growing responses",
    "bands": "make-sum",
    "widths": "make-sum",
    "losses": "make-sum",
    "words": "word lists",
    "words_fresh": "word lists, 2 steps",
    "words_bf16": "word lists, bf16",
    "filler_certain": "certain filler",
    "filler_uncertain": "uncertain filler",
    "density": "",
    "drift": "",
}
"""Sweep → its name; arms of density and drift have settings of their own."""
FIGURES = {
    "accuracy/long_held_out": "accuracy, long",
    "accuracy/short_held_out": "accuracy, short",
    "lre_within_sign": "LRE",
    "clipped_more": "change of clip rate",
    "accuracy/long": "accuracy",
    "clipped_late": "clipped at the end",
    "reward_last": "reward",
    "tilt": "below less above",
    "lopsided": "below, above apart",
    "uneven": "uneven",
    "log_kl": "log KL",
}
RELATIONS = {"above": ">", "below": "<", "equal": "≈"}
ARMS = {
    "sqrt": "√L",
    "none": "no clip",
    "random": "random clip",
    "constant": "constant",
    "linear": "L",
    "noise_signal": "√(L + L²/L*)",
    "measured": "L^a",
    "again": "√L again",
    "gspo": "GSPO",
    "luspo": "LUSPO",
    "quarter": "c/4",
    "half": "c/2",
    "double": "2c",
    "quadruple": "4c",
    "dual_clip": "dual clip",
    "drift": "drift",
    "cppo": "CPPO",
    "pnpo": "PNPO",
}
DENSITY_ARMS = ARMS | {"narrow": "√L c/4", "measured": "√L again", "none": "no band", "bare": "no clip"}
NAMES = {"density": DENSITY_ARMS, "drift": {"auto": "auto", "none": "none", "always": "always"}}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What is claimed of the difference of two arms, before its runs."""

    part: str
    text: str
    figure: str
    arm: str
    less: str = ""
    """The other arm; none: the arm's figure is compared with 0."""
    test: Literal["above", "below", "equal"]
    margin: float
    beyond: bool = False
    """The claim is that the difference exceeds the margin."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The tests of one difference [seeds]."""

    seeds: int
    value: float
    half_width: float
    """Of the 95% t interval."""
    different: float
    """p of the two-sided t test."""
    within: float
    """p of TOST: the larger of the one-sided tests against either end of the margin."""
    beyond: float
    """p of the one-sided test that the difference, with the sign that was measured, exceeds the margin."""
    power: float
    """Chance that TOST finds equal arms within the margin, at 5%, with this spread over as many seeds."""


def compare(gaps: Sequence[float], margin: float) -> Comparison:
    """The tests of differences, one a seed."""
    count, mean = len(gaps), float(np.mean(gaps))
    error = max(float(np.std(gaps, ddof=1)) / count**0.5, 1e-300)
    law = stats.t(count - 1)
    return Comparison(
        seeds=count,
        value=mean,
        half_width=float(law.ppf(0.975)) * error,
        different=float(2 * law.sf(abs(mean) / error)),
        within=float(max(law.sf((mean + margin) / error), law.sf((margin - mean) / error))),
        beyond=float(law.sf((abs(mean) - margin) / error)),
        power=max(0.0, float(2 * law.cdf(margin / error - law.ppf(1 - LEVEL)) - 1)),
    )


def judge(claims: Sequence[Claim], tests: Sequence[Comparison | None]) -> list[Verdict]:
    """A verdict each; None for a claim whose runs are not made."""
    shown = [
        holm([1.0 if test is None else getattr(test, kind) for test in tests])
        for kind in ("different", "within", "beyond")
    ]
    return [_verdict(*each) for each in zip(claims, tests, *shown, strict=True)]


def _verdict(claim: Claim, test: Comparison | None, differs: bool, within: bool, beyond: bool) -> Verdict:
    if test is None:
        return "not run"
    equal = within and test.power >= POWER
    if claim.test == "equal":
        if equal:
            return "supported"
        return "dead" if beyond else "different" if differs else "open"
    if differs and (test.value > 0) == (claim.test == "above"):
        if beyond:
            return "supported beyond the margin"
        if claim.beyond:
            return "direction only"
        return "supported within the margin" if equal else "supported"
    if differs and not equal:
        return "dead" if beyond else "opposite"
    return "no difference" if equal else "open"


def holm(p: Sequence[float]) -> list[bool]:
    """Which of the tests reject, 5% for all of them together (Holm 1979)."""
    rejected = [False] * len(p)
    for rank, number in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        if p[number] * (len(p) - rank) >= LEVEL:
            break
        rejected[number] = True
    return rejected


def read_claims(path: Path = CLAIMS) -> list[Claim]:
    """The claims of a file, in their order."""
    return [Claim(**one) for one in tomllib.loads(path.read_text(encoding="utf-8"))["claim"]]


def differences(result: Mapping[str, Any], claim: Claim) -> list[float]:
    """Of the claim's arms, seed by seed, in a part's results; seeds that both have."""
    arms = [
        {run["seed"]: run[claim.figure] for run in result["runs"] if run["arm"] == arm}
        for arm in (claim.arm, claim.less)
    ]
    if not claim.less:
        arms[1] = dict.fromkeys(arms[0], 0.0)
    return [arms[0][seed] - arms[1][seed] for seed in sorted(arms[0].keys() & arms[1].keys())]


def tested(claims: Sequence[Claim], results: Path = ROOT / "benchmarks/results") -> list[Comparison | None]:
    """The tests of each claim whose part has results."""
    found: list[Comparison | None] = []
    for claim in claims:
        file = results / f"evidence_{claim.part}.json"
        gaps = differences(json.loads(file.read_text(encoding="utf-8")), claim) if file.exists() else []
        found.append(compare(gaps, claim.margin) if len(gaps) > 1 else None)
    return found


def lines(claims: Sequence[Claim]) -> str:
    """A line for each claim: what is compared, what was measured, the margin and the verdict."""
    tests = tested(claims)
    found = []
    for claim, test, verdict in zip(claims, tests, judge(claims, tests), strict=True):
        names = NAMES.get(claim.part, ARMS)
        (setting, arm), (_, less) = (("/" + name).rsplit("/", 1) for name in (claim.arm, claim.less))
        part = PARTS[claim.part] or setting_of(setting[1:])
        other = names[less] if less else "0"
        what = f"{FIGURES[claim.figure]}: {names[arm]} {RELATIONS[claim.test]} {other}"
        measured = "" if test is None else f"{test.value:+.3f} ± {test.half_width:.3f}"
        margin = f"{'>' if claim.beyond else ''}{claim.margin:g}"
        found.append(f"{part:<20} {what:<42} {measured:<16} {margin:>5}  {verdict}")
    return "\n".join(found)


def setting_of(name: str) -> str:
    """``dense, .03``; tempered: ``dense, .03, ½``."""
    return name.replace("-tempered", ", ½").replace("-0", ", ")


def main() -> None:
    """Print the verdicts."""
    parser = options_of(__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=CLAIMS)
    print(lines(read_claims(parser.parse_args().file)))


if __name__ == "__main__":
    main()
