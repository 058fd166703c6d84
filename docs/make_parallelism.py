"""Draws docs/parallelism.svg: ``python docs/make_parallelism.py``. The code says which rank holds a token."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import torch

from megatron_fspo.packing.zigzag import local_positions

TARGET = Path(__file__).with_name("parallelism.svg")
sys.path.insert(0, str(TARGET.parent))
from dark import for_dark  # noqa: E402

CP = 2
PROMPTS, RESPONSES = (4, 2, 1), (8, 5, 2)
CLIPPED = 1

WIDTH, HEIGHT = 976, 716
LEFT = 132  # where the labels end
PANEL, GAP, PAD = 408, 12, 14  # what one rank does, the space between two, its inner margin
WHOLE = 2 * PANEL + GAP
INSIDE = PANEL - 2 * PAD
CELL = 30

INK, MUTED, LINE, WHITE = "#1f2933", "#52606d", "#9aa5b1", "#ffffff"
DARK, LIGHT = ("#3569ad", "#c46f1a", "#357f50"), ("#cfddf1", "#f7e1c8", "#d2e9d9")
# Fill, border and text of a box.
Colours = tuple[str, str, str]
TP: Colours = ("#efe6f9", "#7a4fb3", "#4b2a7b")
CONTEXT: Colours = ("#fbe3e4", "#b3343c", "#7e1e25")
GRADIENTS: Colours = ("#e4e7eb", "#4a5568", INK)
PLAIN: Colours = (WHITE, LINE, INK)
DASHES = f'stroke="{INK}" stroke-width="1.4" stroke-dasharray="4 3" fill="none"'


class Token(NamedTuple):
    """A place in the packed row."""

    sequence: int
    position: int
    chunk: int
    in_mask: bool
    padding: bool

    @property
    def name(self) -> str:
        return "pad" if self.padding else str(self.position)


def packed_row() -> tuple[list[Token], list[int]]:
    """The row as ``collate`` lays it out, and its borders."""
    row: list[Token] = []
    borders = [0]
    for number, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        length = prompt + response
        padded = length + -length % (2 * CP)
        for p in range(padded):
            # Position p predicts the token at p + 1.
            in_mask = prompt - 1 <= p < length - 1
            row.append(Token(number, p, p * 2 * CP // padded, in_mask, p >= length))
        borders.append(len(row))
    return row, borders


def text(x: float, y: float, words: str, *, size: float = 12, fill: str = INK, **more: Any) -> str:
    """Centred on x unless ``anchor`` says otherwise."""
    anchor = more.get("anchor", "middle")
    weight = ' font-weight="600"' if more.get("bold") else ""
    place = f'x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}" text-anchor="{anchor}"'
    return f"<text {place}{weight}>{escape(words)}</text>"


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str, **more: Any) -> str:
    radius, dash = more.get("radius", 5), ' stroke-dasharray="5 3"' if more.get("dashed") else ""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"'
    return f'<rect {place} fill="{fill}" stroke="{stroke}"{dash}/>'


def bar(
    x: float, y: float, width: float, words: str, colours: Colours, height: float = 24, **more: Any
) -> str:
    """A box with one line of text."""
    fill, stroke, ink = colours
    line = text(x + width / 2, y + height / 2 + 4, words, fill=ink, **more)
    return box(x, y, width, height, fill, stroke, **more) + line


def label(y: float, title: str, *rest: str) -> str:
    """What a row is, in the left column."""
    x = LEFT - 10
    small = [text(x, y + 14 * i, line, size=10.5, fill=MUTED, anchor="end") for i, line in enumerate(rest, 1)]
    return "".join([text(x, y, title, anchor="end", bold=True), *small])


def cell(x: float, y: float, token: Token, words: str, *, lit: bool) -> str:
    fill = DARK[token.sequence] if lit else "url(#hatch)" if token.padding else LIGHT[token.sequence]
    square = box(x, y, CELL, 26, fill, LINE if token.padding else WHITE, radius=3)
    return square + text(x + CELL / 2, y + 17, words, size=11, fill=WHITE if lit else MUTED)


def whole_row(row: Sequence[Token]) -> Iterator[str]:
    """The sequences end to end, and the rank of each chunk."""
    space = 16
    first = LEFT + (WHOLE - CELL * len(row) - 2 * space) / 2
    for number, token in enumerate(row):
        x = first + CELL * number + space * token.sequence
        yield cell(x, 90, token, token.name, lit=token.in_mask)
        size = sum(other.sequence == token.sequence for other in row)
        if token.position == 0:
            words = f"sequence {token.sequence}, L = {RESPONSES[token.sequence]}"
            yield text(x + size * CELL / 2, 82, words, fill=DARK[token.sequence], bold=True)
        if token.position * 2 * CP % size == 0:  # a chunk begins
            rank = min(token.chunk, 2 * CP - 1 - token.chunk)
            fill, ink = ((GRADIENTS[0], INK), (MUTED, WHITE))[rank]
            width = CELL * size / (2 * CP)
            yield box(x + 1, 119, width - 2, 17, fill, fill, radius=3)
            yield text(x + width / 2, 131.5, f"cp {rank}", size=10.5, fill=ink)


def pills(x: float, y: float, words: Sequence[str], hollow: int | None = None) -> Iterator[str]:
    """One box per sequence."""
    width = (INSIDE - 20) / 3
    for number, line in enumerate(words):
        fill = WHITE if number == hollow else LIGHT[number]
        colours = (fill, DARK[number], INK)
        yield bar(x + number * (width + 10), y, width, line, colours, 22, dashed=number == hollow)


def rank_panel(rank: int, row: Sequence[Token]) -> Iterator[str]:
    """What one context-parallel rank does."""
    left = LEFT + rank * (PANEL + GAP)
    x, middle = left + PAD, left + PANEL / 2
    yield box(left, 148, PANEL, 476, "#f8f9fb", "#cbd2d9", radius=8)
    title = f"cp rank {rank}, on both tp ranks: chunks {rank} and {2 * CP - 1 - rank}"
    yield text(middle, 167, title, bold=True)
    space = (INSIDE - CELL * len(row)) / 2
    for number, token in enumerate(row):
        at = x + CELL * number + space * token.sequence
        yield cell(at, 175, token, token.name, lit=token.in_mask)
        yield cell(at, 378, token, "" if token.in_mask else "0", lit=token.in_mask)
        weighs = token.in_mask and token.sequence != CLIPPED
        yield cell(at, 550, token, "" if weighs else "0", lit=weighs)
    for start, width, words in ((0, 116, "pp stage 0"), (120, 116, "pp stage 1 …"), (240, 140, "last stage")):
        shape = f"M{x + start:g} 244h{width - 9}l9 12l-9 12h-{width - 9}l9 -12z"
        yield f'<path d="{shape}" fill="{WHITE}" stroke="{LINE}"/>'
        yield text(x + start + width / 2 + 2, 260, words)
    yield bar(x, 282, INSIDE, "backward, over TP: broadcast, all-reduce of d hidden", TP, dashed=True)
    half = (INSIDE - 8) / 2
    yield bar(x, 312, half, "tp 0: ids 0 … V/2 − 1", PLAIN)
    yield bar(x + half + 8, 312, half, "tp 1: ids V/2 … V − 1", PLAIN)
    yield bar(x, 342, INSIDE, "all-gather over TP: 4 floats per response token", TP)
    own = [sum(token.in_mask and token.sequence == number for token in row) for number in range(3)]
    yield from pills(
        x, 416, [f"Σ over {mine} of {whole}" for mine, whole in zip(own, RESPONSES, strict=True)]
    )
    yield from pills(x, 484, [f"S{sub}, L = {length}" for sub, length in zip("₀₁₂", RESPONSES, strict=True)])
    yield from pills(x, 514, ["exp(S₀)·A₀", "clipped: 0", "exp(S₂)·A₂"], hollow=CLIPPED)
    loss = f"loss = −(T/N)·Σ weight·log π;  num_tokens = {sum(own)}"
    yield bar(x, 588, INSIDE, loss, PLAIN, 26)
    for y in (207, 275, 372, 410, 444, 478, 544, 582, 630):
        yield f'<path d="M{middle - 5:g} {y - 3}h10l-5 6z" fill="{LINE}"/>'
    # The gradient leaves the loss, passes by the weights and S, and enters log π.
    edge, side = (left + 6, x) if rank == 0 else (left + PANEL - 6, x + INSIDE)
    yield f'<path d="M{side} 601H{edge}V300M{edge} 391H{side}" {DASHES}/>'
    yield f'<path d="M{edge - 4.5:g} 303h9l-4.5 -8z" fill="{INK}"/>'


def across() -> Iterator[str]:
    """What the ranks do together."""
    x, width, middle = LEFT + PAD, WHOLE - 2 * PAD, LEFT + WHOLE / 2
    yield bar(x, 213, width, "in every layer: attention over CP (on a CPU all keys are gathered)", CONTEXT)
    yield bar(x, 449, width, "all-reduce over CP: n = 3 exact sums, detached", CONTEXT, bold=True)
    yield box(LEFT, 636, WHOLE, 44, *GRADIENTS[:2])
    summed = "Megatron: gradients and num_tokens summed over DP × CP, then gradients ÷ T"
    yield text(middle, 654, summed, bold=True)
    others = "the other data-parallel ranks hold other sequences; T and N are the whole step's"
    yield text(middle, 671, others, fill=MUTED)
    result = "= −(1/N) Σ ∇J over all N sequences, whatever the split"
    yield text(middle, 702, result, size=14, bold=True)


def labels() -> Iterator[str]:
    yield label(94, "one packed row", "n = 3 sequences,", "in 2·cp chunks each")
    yield label(190, "zigzag", "early + late chunk")
    yield label(252, "layers", "below here: only", "the last stage")
    yield label(322, "head", "logits of some", "tokens at a time")
    yield label(390, "log π", "then new − old")
    yield label(424, "own sums", "one a sequence")
    yield label(492, "S and L", "the same on all ranks")
    yield label(524, "band → weight", "cp 0's, broadcast")
    yield label(562, "weight per token", "detached")
    yield label(605, "loss of a rank")
    yield label(661, "gradient")


def legend() -> Iterator[str]:
    yield text(
        LEFT, 24, "A micro-batch on one copy of the model: tp = 2, cp = 2", size=15, anchor="start", bold=True
    )
    kinds = (
        (0, DARK[0], WHITE, "its label is a response token"),
        (226, LIGHT[0], WHITE, "it is not"),
        (318, "url(#hatch)", LINE, "padding"),
    )
    for x, fill, stroke, words in kinds:
        yield box(LEFT + x, 39, 18, 15, fill, stroke, radius=3)
        yield text(LEFT + x + 25, 51, words, anchor="start", fill=MUTED)
    x = LEFT + 418
    yield f'<path d="M{x} 47h26" {DASHES}/><path d="M{x + 25} 42.5v9l8 -4.5z" fill="{INK}"/>'
    yield text(x + 42, 51, "gradient", anchor="start", fill=MUTED)
    for at, width, words, colours in (
        (126, 40, "TP", TP),
        (174, 40, "CP", CONTEXT),
        (222, 72, "DP × CP", GRADIENTS),
    ):
        yield bar(x + at, 38, width, words, colours, 18)


def render() -> str:
    """The whole picture."""
    row, borders = packed_row()
    fonts = "Helvetica, Arial, Liberation Sans, DejaVu Sans, sans-serif"
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{fonts}">',
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="6" height="6" fill="{WHITE}"/>'
        '<path d="M0 0V6" stroke="#dfe3e8" stroke-width="4"/></pattern></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{WHITE}"/>',
        *legend(),
        *whole_row(row),
    ]
    for rank in range(CP):
        parts += rank_panel(rank, [row[i] for i in local_positions(torch.tensor(borders), rank, CP).tolist()])
    return for_dark("\n".join([*parts, *across(), *labels(), "</svg>"]) + "\n")


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
