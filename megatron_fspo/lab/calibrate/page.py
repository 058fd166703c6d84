"""The findings as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter

from megatron_fspo.lab.calibrate.table import SAID, interval, name, number
from megatron_fspo.lab.report.drawing import BLUE, EDGE, GREEN, GREY, ORANGE, PURPLE, legend, picture
from megatron_fspo.lab.report.page import template
from megatron_fspo.trainer.noise import Calibration, NoiseRecord

_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, GREY)


def write_page(found: Calibration, path: Path) -> None:
    """Write the page."""
    noisy = [one for one in found.comparisons if (one.sigma[0] or 0) > 0]
    svgs = {}
    if noisy:
        in_s = [one for one in noisy if one.kind in ("sampler", "updates")]
        passes = [one for one in noisy if one.kind in ("sampler", "precision")]
        svgs = {"rates": _rates(in_s, found.longest), "spread": _spread(passes, found.max_response_tokens)}
    text = template(Path(__file__).with_name("page.html")).render(
        found=found,
        noisy=noisy,
        said=SAID,
        name=name,
        number=number,
        interval=interval,
        svgs={key: Markup(svg) for key, svg in svgs.items()},
    )
    path.write_text(text, encoding="utf-8")


@picture(4.6, 3.6)
def _rates(figure: Figure, noisy: Sequence[NoiseRecord], longest: int) -> None:
    """Share outside the band by noise alone, with its interval."""
    axes = figure.subplots()
    for one, colour in zip(noisy, _COLOURS, strict=False):
        at = [x.length for x in one.by_length]
        value, low, high = ([x.clip_rate[i] or 0.0 for x in one.by_length] for i in range(3))
        axes.fill_between(at, low, high, color=colour, alpha=0.15, lw=0)
        axes.plot(at, value, color=colour, marker="o", ms=3.5, lw=1.4, label=_label(one))
    axes.axvline(longest, color=EDGE, ls=":", lw=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0, 1)
    axes.set_xlabel("response length L (tokens)")
    axes.set_ylabel("outside by noise alone")
    legend(axes, columns=2)


@picture(4.6, 3.6)
def _spread(figure: Figure, noisy: Sequence[NoiseRecord], longest: int) -> None:
    """sigma·√L and |drift|·L against length: they cross at L*."""
    axes = figure.subplots()
    at = [2**i for i in range(4, 31) if 2**i < longest] + [longest]
    for one, colour in zip(noisy, _COLOURS, strict=False):
        sigma, drift = one.sigma[0] or 0.0, abs(one.drift[0] or 0.0)
        axes.plot(at, [sigma * n**0.5 for n in at], color=colour, lw=1.4, label=_label(one))
        axes.plot(at, [drift * n for n in at], color=colour, lw=1, ls="--")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("response length L (tokens)")
    axes.set_ylabel("nats: spread, drift (dashed)")
    legend(axes, columns=2)


def _label(one: NoiseRecord) -> str:
    return f"{one.kind}, {one.precision}{'*' if one.emulated else ''}"
