"""The findings as text for the console, as one JSON object, and as a row for each response."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from megatron_fspo.lab.explain.findings import Findings, OfLoss
from megatron_fspo.lab.explain.losses import FATES
from megatron_fspo.lab.explain.words import limits_of, sentences


def render(found: Findings) -> str:
    """For the console."""
    return "\n".join(_lines(found))


def as_json(found: Findings) -> dict[str, Any]:
    """All figures, as JSON types: NaN is null."""
    dump = found.dump
    content = {
        "file": str(dump.path),
        "responses": len(dump),
        "with_advantage": int((dump.advantages != 0).sum()),
        "tokens": int(dump.lengths.sum()),
        "empty": dump.empty,
        "nonfinite": dump.nonfinite,
        "sigma": found.sigma,
        "exponent": found.exponent if isinstance(found.exponent, str) else asdict(found.exponent),
        "independent": dump.clustered_by,
        "clusters": len(dump.clusters.unique()),
        "parts": None if found.parts is None else asdict(found.parts),
        "noise": found.noise_source,
        "bins": [asdict(one) for one in found.bins],
        "given": [asdict(one) for one in found.given],
        "rate": found.rate,
        "matched": [asdict(one) for one in found.matched],
        "limits_for": [asdict(one) for one in found.limits_for],
        "disagreements": [asdict(one) for one in found.disagreements],
        "words": list(sentences(found)),
    }
    plain = _plain(content)
    assert isinstance(plain, dict)
    return plain


def fates(found: Findings) -> Iterator[str]:
    """A line of JSON for each response: its row, L, S, A, and its fate with each loss."""
    dump = found.dump
    columns = [dump.rows, dump.lengths, dump.log_ratio_sum, dump.advantages]
    columns += [verdict.fates(dump.advantages) for verdict in found.verdicts]
    names = [one.name for one in found.given]
    for row, length, s, advantage, *codes in zip(*(column.tolist() for column in columns), strict=True):
        fate = {name: FATES[code] for name, code in zip(names, codes, strict=True)}
        values = {"row": row, "length": length, "log_ratio_sum": s, "advantage": advantage, "fate": fate}
        yield json.dumps(values) + "\n"


def losses_table(losses: Sequence[OfLoss]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: what each loss does with all responses."""
    head = [
        "loss",
        "limits",
        "outside",
        "by noise",
        "clipped",
        "of tokens",
        "LRE mean",
        "by chance",
        "LRE max",
        "ESS",
    ]
    rows = [
        [
            one.name,
            limits_of(one.limits),
            percent(one.out_of_band),
            percent(one.noise),
            percent(one.clipped),
            percent(one.clipped_tokens),
            _with_interval(one.lre.mean, one.lre.mean_interval),
            number(one.lre.null_mean, ".3f"),
            number(one.lre.max, ".3f"),
            number(one.ess),
        ]
        for one in losses
    ]
    return head, rows


def bins_table(found: Findings, losses: Sequence[OfLoss]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: what each loss does with the responses of a length."""
    names = [one.name for one in losses]
    head = ["tokens", "responses"]
    head += [f"{what} {name}" for what in ("outside", "ESS", "mass") for name in names]
    rows = []
    for at, one in enumerate(found.bins):
        here = [loss.by_length[at] for loss in losses]
        span = f"{one.low}" if one.low == one.high else f"{one.low}–{one.high}"
        cells = [span, percent(one.share)]
        cells += [percent(x.out_of_band) for x in here]
        cells += [number(x.ess) for x in here]
        cells += [percent(x.mass) for x in here]
        rows.append(cells)
    return head, rows


def fates_table(found: Findings) -> tuple[list[str], list[list[str]]]:
    """Head and rows: who changes fate between two losses."""
    head = ["kept by", "clipped by", "responses", "share", "L, quartiles", "A > 0", "reward", "rows, such as"]
    rows = [
        [
            one.kept_by,
            one.clipped_by,
            f"{one.responses:,}",
            percent(one.share),
            "–".join(map(str, one.lengths)) if one.responses else "-",
            percent(one.rising),
            number(one.mean_reward),
            " ".join(map(str, dict.fromkeys(one.examples))) or "-",
        ]
        for one in found.disagreements
    ]
    return head, rows


def limits_table(found: Findings) -> tuple[list[str], list[list[str]]]:
    """Head and rows: the limits that give a loss another one's rate."""
    head = ["loss", "puts outside as", "with", "times as wide", "outside"]
    rows = [
        [one.name, one.to, limits_of(one.limits), f"{one.factor:.3g}", percent(one.out_of_band)]
        for one in found.limits_for
    ]
    return head, rows


def percent(value: float) -> str:
    """A share; a dash for none."""
    return "-" if math.isnan(value) else f"{value:.1%}"


def number(value: float, form: str = ".2f") -> str:
    """A figure; a dash for none."""
    return "-" if math.isnan(value) else f"{value:{form}}"


def _with_interval(value: float, interval: tuple[float, float]) -> str:
    return "-" if math.isnan(value) else f"{value:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"


def _lines(found: Findings) -> Iterator[str]:
    yield from sentences(found)
    yield ""
    yield "with the limits given; clipped: of responses with an advantage; ESS of the importance weights"
    yield from _columns(*losses_table(found.given))
    if found.matched:
        yield ""
        yield f"with {found.rate:.1%} outside for each"
        yield from _columns(*losses_table(found.matched))
    yield ""
    yield f"by length, {'at this rate' if found.matched else 'with the limits given'}; mass: of the gradient"
    yield from _columns(*bins_table(found, found.matched or found.given))
    yield ""
    yield "responses that change fate, with the limits given"
    yield from _columns(*fates_table(found))
    yield ""
    yield "limits that put the same share outside"
    yield from _columns(*limits_table(found))


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in [head, *rows]:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, torch.Tensor):
        return _plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
