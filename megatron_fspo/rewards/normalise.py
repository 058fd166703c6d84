r"""Tier 1 of ``math``: compares answers where that is certain without algebra.

Surrounding LaTeX and Markdown is removed. Answers that are plain numbers are compared exactly, as integers
and fractions: ``0.50``, ``1/2``, ``\frac12`` and ``5\times10^{-1}`` are equal. Nothing is evaluated, and
characters, digits and exponents are bounded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from hashlib import sha256
from itertools import accumulate

from megatron_fspo.rewards.extract import end_of_braces

LONGEST = 1000
"""Maximum characters of an answer to parse; longer ones are compared as text."""
DEEPEST = 32
DIGITS = 300
EXPONENT = 400  # largest exponent of ten
POWER = 9999  # largest exponent for tier 2
CLOSE = Fraction(1, 10_000)
"""Decimals with a smaller relative difference may be rounded values of one number: tier 2 decides."""


@dataclass(frozen=True)
class Number:
    value: int | Fraction
    decimal: bool = False
    """It has digits after a point, so it may be rounded."""
    percent: bool = False
    base: int = 10


@dataclass(frozen=True)
class Form:
    """An answer without surrounding markup."""

    text: str
    number: Number | None


_WRAPPERS = (
    *((f"\\{name}{{", "}") for name in ("boxed", "text", "textbf", "mathrm", "mathbf", "mbox", "textit")),
    *(("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`")),
)
_OPENINGS = {opening[0] for opening, _ in _WRAPPERS}
_SPELLINGS = (
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(?:left|right|displaystyle|limits)(?![a-zA-Z])"), ""),
    (re.compile(r"\\[,!;:]|\{,\}(?=\d{3})"), ""),
    (re.compile(r"\\[ ]|~|\\quad(?![a-zA-Z])"), " "),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(r"\\(?:leq|geq|neq)(?![a-zA-Z])"), lambda m: m[0][:3]),
)
_SPACE = re.compile(r"\s+(?=[^\w\s\\])|(?<=[^\w\s])\s+")
_MINUS = str.maketrans({"−": "-", "–": "-", "\u00a0": " "})
_SIGN = r"([-+]?)\s*"
_DECIMAL = re.compile(
    _SIGN + r"(?=\.?\d)(\d{1,3}(?:,\d{3})+|\d*)(?:\.(\d*))?(?:[eE]([-+]?\d{1,4}))?", re.ASCII
)
_SLASH = re.compile(_SIGN + r"(?:(\d+)\s+)?(\d+)\s*/\s*(\d+)", re.ASCII)
_FRACTION = re.compile(
    _SIGN + r"(\d*)\s*\\frac\s*(?:\{\s*([-+]?\d+)\s*\}|(\d))\s*(?:\{\s*([-+]?\d+)\s*\}|(\d))", re.ASCII
)
_SCIENTIFIC = re.compile(
    _SIGN
    + r"(?:(\d+)(?:\.(\d+))?\s*(?:\\times|\\cdot|×|·|\*)\s*)?10\s*\^\s*(?:\{\s*([-+]?\d{1,4})\s*\}|(\d))",
    re.ASCII,
)
_BASED = re.compile(r"([0-9]+)\s*_\s*(?:\{\s*(\d{1,2})\s*\}|(\d{1,2}))", re.ASCII)
_CHOICE = re.compile(r"[(\[]?([A-J])[)\].:]*")
_WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s'-]+[^\W\d_]+)*")
_NAMED = re.compile(r"[a-zA-Z]\s*=\s*")
_TOWER = re.compile(r"\d[\s{(]*(?:\^|\*\*)[\s{(]*-?(\d+)[\s{(]*(?:\^|\*\*)[\s{(]*-?(\d+)", re.ASCII)
_HOSTILE = (
    re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]"),  # control characters
    re.compile(rf"\d{{{DIGITS + 1}}}"),
    re.compile(r"(?:\^|\*\*|\d[eE])[\s{(]*[-+]?\d{5}"),  # a power above POWER
    re.compile(
        r"(?:(?:\^|\*\*)[\s{(]*[-+]?(?:\d+|[a-zA-Z]|\\[a-zA-Z]+)[\s)]*){2}(?:\^|\*\*)"
    ),  # a tower of them
    re.compile(r"\d{5}[\s)}]*!|![\s)}]*!"),  # a large factorial
)


def compare(gold: Form, answer: Form) -> bool | None:
    """Return True if the answer is the reference, False if both are different numbers, None if uncertain."""
    if gold.number is not None and answer.number is not None:
        return _compare_numbers(gold.number, answer.number)
    same = gold.text == answer.text or (
        gold.text.lower() == answer.text.lower() and _WORDS.fullmatch(gold.text) is not None
    )
    return True if same and gold.text else None


def canonical(written: Form) -> str:
    """Return one text for all answers that :func:`compare` finds equal, as the key of majority votes."""
    if written.number is None and (named := _NAMED.match(written.text)) is not None:
        value = form(written.text[named.end() :])
        written = value if value.number is not None else written
    number = written.number
    if number is not None:
        base = f"_{number.base}" if number.base != 10 else ""
        return f"{number.value}{base}{'%' if number.percent else ''}"
    if len(written.text) > LONGEST:
        return f"sha256:{sha256(written.text.encode('utf-8', 'replace')).hexdigest()}"
    return written.text.lower() if _WORDS.fullmatch(written.text) else written.text


def form(answer: str) -> Form:
    """Return an answer without surrounding markup, and its number if it is a plain one."""
    if len(answer) > LONGEST:
        return Form(answer.strip(), None)
    text = answer.strip().translate(_MINUS)
    number = _plain_number(text)
    if number is None:
        text = _unwrapped(text)
        if "\\" in text or "~" in text or "{,}" in text:
            for pattern, spelling in _SPELLINGS:
                text = pattern.sub(spelling, text)
            text = _unwrapped(text)
        bare = text.removesuffix("%").rstrip()
        number = _plain_number(bare)
        if number is None and len(bare) <= DIGITS:
            number = _formula(bare)
        if number is not None and text.endswith("%"):
            number = replace(number, percent=True)
    if number is None:
        text = _SPACE.sub("", text)
        choice = _CHOICE.fullmatch(text)
        text = choice[1] if choice else text
    return Form(text, number)


def too_much(text: str) -> bool:
    """Return True if algebra on the answer could be too expensive, or its text is malformed."""
    if len(text) > LONGEST or any(pattern.search(text) for pattern in _HOSTILE):
        return True
    depths = accumulate((character in "{([") - (character in "})]") for character in text)
    if max(depths, default=0) > DEEPEST:
        return True
    towers = [(int(tower[1][:6]), int(tower[2][:6])) for tower in _TOWER.finditer(text)]
    return any(middle > 1 and (top > 20 or middle**top > POWER) for middle, top in towers)


def _compare_numbers(gold: Number, answer: Number) -> bool | None:
    if gold.percent != answer.percent or (gold.base != answer.base and 10 in (gold.base, answer.base)):
        return None
    if gold.base != answer.base or gold.value == answer.value:
        return gold.base == answer.base
    one, other = Fraction(gold.value), Fraction(answer.value)
    close = abs(one - other) <= CLOSE * max(abs(one), abs(other))
    return None if close and (gold.decimal or answer.decimal) else False


def _unwrapped(text: str) -> str:
    """Return the text without a final full stop and markup around the whole."""
    for _ in range(4):
        before = text
        text = text.strip()
        if not text or (text[-1] != "." and text[0] not in _OPENINGS):
            break
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1].rstrip()
        for opening, closing in _WRAPPERS:
            if text.startswith(opening):
                first = len(opening)
                end = end_of_braces(text, first) if closing == "}" else text.find(closing, first)
                if end == len(text) - len(closing):  # false for \text{a}+\text{b} and $1$, $2$
                    text = text[first:end]
        if text == before:
            break
    return text


def _plain_number(text: str) -> Number | None:
    if len(text) > DIGITS or (written := _DECIMAL.fullmatch(text)) is None:
        return None
    sign, whole, places, exponent = written.groups()
    return _decimal(sign, whole.replace(",", ""), places or "", int(exponent or 0))


def _decimal(sign: str, whole: str, places: str, exponent: int) -> Number | None:
    if abs(exponent) > EXPONENT:
        return None
    shift = exponent - len(places)
    value: int | Fraction = int(whole + places or "0")
    value = value * 10**shift if shift >= 0 else Fraction(value, 10**-shift)
    return Number(-value if sign == "-" else value, decimal=bool(places) or exponent < 0)


def _formula(text: str) -> Number | None:
    """Parse a number times a power of ten, a number with a base, or a fraction. The digits of ``1011_2`` are
    kept unconverted."""
    if (power := _SCIENTIFIC.fullmatch(text)) is not None:
        sign, whole, places, braced, digit = power.groups()
        return _decimal(sign, whole or "1", places or "", int(braced or digit))
    if (based := _BASED.fullmatch(text)) is not None:
        base = int(based[2] or based[3])
        legal = base >= 2 and all(int(digit) < base for digit in based[1])
        return Number(int(based[1]), base=base) if legal else None
    if (slash := _SLASH.fullmatch(text)) is not None:
        sign, whole, top, bottom = slash.groups()
    elif (written := _FRACTION.fullmatch(text)) is not None:
        sign, whole = written[1], written[2]
        top, bottom = written[3] or written[4], written[5] or written[6]
    else:
        return None
    if int(bottom) == 0:
        return None
    value = Fraction(int(top), int(bottom))
    if whole:
        if not 0 <= value < 1:  # not a mixed number
            return None
        value += int(whole)
    return Number(-value if sign == "-" else value)
