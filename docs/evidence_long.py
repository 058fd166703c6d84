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
    one = long["differences"]["one"]
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
            [
                "S of",
                "exponent along a response",
                "over responses",
                "noise, nats/√token",
                "signal, nats/token",
                "L*",
            ],
            [
                [name, ranged(one["within"], ".2f"), ranged(one["exponent"], ".2f")]
                + [ranged(one[part], ".2g") for part in ("noise", "signal")]
                + ["none" if one["crossover"] is None else f"{one['crossover']:,.0f}"]
                for name, one in found.items()
            ],
        ),
        "long_drift": ranged(first["drift"], ".5f"),
        "long_half": f"{-(first['noise']['value'] ** 2) / 2:.5f}",
        "correlated_noise": f"{max(map(abs, first['autocorrelation'].values())):.3f}",
        "correlated_near": f"{one['autocorrelation']['4']:.2f}",
        "correlated_far": f"{one['autocorrelation']['1024']:.2f}",
        "long_losses": rows(
            ["", *found],
            [
                [label, *(f"{one['losses'][loss]['lre_mean']['value']:.3f}" for one in found.values())]
                for loss, label in LOSSES.items()
            ]
            + [["by chance", *(f"{one['losses']['measured']['lre_null']:.3f}" for one in found.values())]],
        ),
        "long_rloo_above": ranged(first["losses"]["rloo"]["above_measured"], "+.3f"),
        "long_gspo_above": ranged(first["losses"]["gspo"]["above_measured"], "+.3f"),
        "long_bins": str(len(first["losses"]["measured"]["rates"])),
    }


def rows(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * " | ".join(head).count(" | ") + ["---"], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def ranged(found: Mapping[str, Any], form: str) -> str:
    """A figure and its interval."""
    low, high = found["interval"]
    return f"{found['value']:{form}} [{low:{form}}, {high:{form}}]"
