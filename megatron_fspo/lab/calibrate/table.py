"""The findings as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_fspo.trainer.noise import Calibration, Interval, NoiseRecord

SAID = {
    "repeat": "the same pass again",
    "packs": "with other packs",
    "sampler": "trainer against sampler",
    "precision": "coarser against finer",
    "updates": "added to S by the updates",
}
"""What each comparison is."""


def render(found: Calibration) -> str:
    """For the console."""
    return "\n".join(_lines(found))


def _lines(found: Calibration) -> Iterator[str]:
    yield (
        f"{found.responses} responses to {found.prompts} prompts, {found.tokens:,} tokens, the longest "
        f"{found.longest}; {found.model} in {found.dtype} on {found.device}"
    )
    yield f"band: {found.band}; 95% intervals over prompts"
    yield ""
    yield from _comparisons(found)
    yield ""
    yield (
        f"smallest c: noise alone leaves 1% outside at {found.max_response_tokens} tokens; centred: on drift"
    )
    if found.first_updates is not None:
        yield f"c = 2 sigma-hat of the first off-policy updates: {both(found.first_updates)}"
        if found.first_updates_exponent is not None:
            yield (
                "exponent of S there, of noise and of what training moves together: "
                f"{both(found.first_updates_exponent, '.2f')}; ½ is noise alone"
            )
    else:
        yield "no off-policy update was seen: responses were given, or too few groups had a spread"
    yield ""
    if noisy := [one for one in found.comparisons if (one.sigma[0] or 0) > 0]:
        yield from _by_length(found, noisy)


def _comparisons(found: Calibration) -> Iterator[str]:
    yield from _columns(
        [
            "comparison",
            "precision",
            "sigma / √token",
            "drift / token",
            "exponent",
            "L*",
            "smallest c",
            "c, centred",
        ],
        [
            [
                SAID[one.kind],
                name(one),
                both(one.sigma),
                both(one.drift),
                both(one.exponent, ".2f"),
                both(one.crossover, ",.0f"),
                both(one.smallest_c),
                both(one.smallest_c_centred),
            ]
            for one in found.comparisons
        ],
    )


def _by_length(found: Calibration, noisy: Sequence[NoiseRecord]) -> Iterator[str]:
    yield "share of responses that noise alone puts outside the band, by length"
    yield from _columns(
        ["tokens", *(f"{one.kind}, {name(one)}" for one in noisy)],
        [
            [f"{at.length}{'' if at.length <= found.longest else ' *'}"]
            + [both(one.by_length[row].clip_rate, ".1%") for one in noisy]
            for row, at in enumerate(noisy[0].by_length)
        ],
    )
    if found.longest < found.max_response_tokens:
        yield "* longer than any that was measured"
    yield ""
    yield "the same, predicted from the other half of the prompts, and measured"
    yield from _columns(
        ["tokens", "responses", "comparison", "predicted", "measured"],
        [
            [
                f"{check.low}-{check.high}",
                str(check.responses),
                f"{one.kind}, {name(one)}",
                f"{check.predicted:.1%}",
                both(check.measured, ".1%"),
            ]
            for one in noisy
            for check in one.checks
        ],
    )


def name(one: NoiseRecord) -> str:
    """Its precision, and whether that is the real one."""
    return f"{one.precision} (emulated)" if one.emulated else one.precision


def both(found: Interval, form: str = ".2g") -> str:
    """A figure and its interval."""
    return f"{number(found, form)} {interval(found, form)}".rstrip()


def number(found: Interval, form: str = ".2g") -> str:
    """A figure; a dash for none."""
    return "-" if found[0] is None else f"{found[0]:{form}}"


def interval(found: Interval, form: str = ".2g") -> str:
    """Of a figure; nothing where it is 0 or has none."""
    value, low, high = found
    return f"[{low:{form}}, {high:{form}}]" if value and low is not None and high is not None else ""


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in [head, *rows]:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
