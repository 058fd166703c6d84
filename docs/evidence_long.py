"""The tables of docs/evidence.md on long responses, from benchmarks/results/long_responses.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LOSSES = {
    "measured": "FSPO, a measured",
    "fspo": "FSPO, a = ½",
    "rloo": "RLOO",
    "gspo": "GSPO",
    "ctpo": "CTPO, all prefixes, a = ½",
}
DIFFERENCES = {"noise": "precision", "one": "1 update", "three": "3 updates"}


def long_responses(long: Mapping[str, Any]) -> dict[str, str]:
    """What the section of that name has."""
    low, _, median, _, high = long["lengths"]
    found = {DIFFERENCES[name]: one for name, one in long["differences"].items()}
    first = next(iter(found.values()))
    places = [at["length"] for at in first["exponents_at"]]
    moved = DIFFERENCES["three"]
    return {
        "long_responses": str(long["responses"]),
        "long_prompts": str(long["prompts"]),
        "long_low": f"{low:,}",
        "long_high": f"{high:,}",
        "long_median": f"{median:,}",
        "long_outside": f"{long['outside']:.0%}",
        "within_from": f"{first['within']['from']:,}",
        "within_to": f"{first['within']['to']:,}",
        "within_responses": str(first["within"]["responses"]),
        "long_parts": rows(
            ["S of", "along a response", "over responses", "noise, nats/√token", "signal, nats/token", "L*"]
            + [f"exponent at {at:,}" for at in places],
            [
                [name, ranged(one["within"], ".2f"), ranged(one["exponent"], ".2f")]
                + [ranged(one[part], ".2g") for part in ("noise", "signal")]
                + ["none" if one["crossover"] is None else f"{one['crossover']:,.0f}"]
                + [ranged(at, ".2f") for at in one["exponents_at"]]
                for name, one in found.items()
            ],
        ),
        "long_correlation": rows(
            ["S of", *first["autocorrelation"]],
            [[name, *(f"{x:.3f}" for x in one["autocorrelation"].values())] for name, one in found.items()],
        ),
        "long_checks": rows(
            ["tokens", "responses", *(f"{name}: outside | predicted | difference" for name in found)],
            [
                [span(bins[0]["low"], bins[0]["high"]), str(bins[0]["responses"])]
                + [
                    f"{ranged(one['measured'], '.0%')} | {ranged(one['predicted'], '.0%')} | "
                    "[{:+.0%}, {:+.0%}]".format(*one["difference"])
                    for one in bins
                ]
                for bins in zip(*(one["checks"] for one in found.values()), strict=True)
            ],
        ),
        "long_losses": rows(
            ["", *(f"{name}: LRE mean | above FSPO, a measured" for name in found)],
            [
                [label]
                + [
                    f"{one['losses'][loss]['lre_mean']['value']:.3f} | "
                    + ("" if loss == "measured" else ranged(one["losses"][loss]["above_measured"], ".3f"))
                    for one in found.values()
                ]
                for loss, label in LOSSES.items()
            ],
        ),
        "long_rates": rows(
            [f"{moved}, by length", *(span(one["low"], one["high"]) for one in found[moved]["checks"])],
            [
                [label, *(f"{rate:.0%}" for rate in found[moved]["losses"][loss]["rates"])]
                for loss, label in LOSSES.items()
            ],
        ),
        "long_bins": str(len(first["losses"]["measured"]["rates"])),
        "long_chance": ", ".join(f"{one['losses']['measured']['lre_null']:.3f}" for one in found.values()),
    }


def rows(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * " | ".join(head).count(" | ") + ["---"], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def span(low: int, high: int) -> str:
    """Lengths from the one to the other."""
    return f"{low:,}–{high:,}" if high > low else f"{low:,}"


def ranged(found: Mapping[str, Any], form: str) -> str:
    """A figure and its interval."""
    low, high = found["interval"]
    return f"{found['value']:{form}} [{low:{form}}, {high:{form}}]"
