r"""Tier 1: whether two answers are the same, where that is certain without any algebra.

Answers are stripped of what LaTeX and Markdown put around them and, where they are plainly numbers, compared
exactly, as integers and fractions: ``0.50``, ``1/2``, ``\frac12`` and ``5\times10^{-1}`` are one number.
Nothing is evaluated, and all is bounded: characters, digits, exponents.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from hashlib import sha256

from megatron_fspo.rewards.extract import BRACES

LONGEST = 1000
"""Characters of an answer that is read; longer ones are compared as they stand."""
DEEPEST = 32
DIGITS = 300
EXPONENT = 400  # of ten
POWER = 9999  # exponents that tier 2 may have to work out
CLOSE = Fraction(1, 10_000)
"""Decimals that differ by a smaller share may be one number, rounded: tier 2 says."""


class Sameness(Enum):
    """Tier 1's comparison of an answer with its reference."""

    EQUAL = "equal"
    DIFFERENT = "different"
    """Both are plainly numbers, and not the same."""
    UNSURE = "unsure"


@dataclass(frozen=True)
class Number:
    """A number as it was written."""

    value: int | Fraction
    decimal: bool = False
    """With digits behind a point: it may be rounded."""
    percent: bool = False
    base: int = 10


@dataclass(frozen=True)
class Form:
    """An answer, undressed."""

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
_INTEGER = re.compile(_SIGN + r"(\d{1,3}(?:,\d{3})+|\d+)", re.ASCII)
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
_HOSTILE = {
    "control characters": re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]"),
    f"a number of more than {DIGITS} digits": re.compile(rf"\d{{{DIGITS + 1}}}"),
    f"a power above {POWER}": re.compile(r"(?:\^|\*\*|\d[eE])[\s{(]*[-+]?\d{5}"),
    "a tower of powers": re.compile(
        r"(?:(?:\^|\*\*)[\s{(]*[-+]?(?:\d+|[a-zA-Z]|\\[a-zA-Z]+)[\s)]*){2}(?:\^|\*\*)"
    ),
    "a large factorial": re.compile(r"\d{5}[\s)}]*!|![\s)}]*!"),
}


def compare(gold: str, answer: str) -> Sameness:
    """Return whether ``answer`` is the reference ``gold``, as far as that is certain."""
    return compare_forms(form(gold), form(answer))


def compare_forms(gold: Form, answer: Form) -> Sameness:
    """:func:`compare` for answers that are undressed already."""
    if gold.number is not None and answer.number is not None:
        return _compare_numbers(gold.number, answer.number)
    same = gold.text == answer.text or (
        gold.text.lower() == answer.text.lower() and _WORDS.fullmatch(gold.text) is not None
    )
    return Sameness.EQUAL if same and gold.text else Sameness.UNSURE


def canonical(answer: str) -> str:
    """Return one text for answers that :func:`compare` takes for equal: the key of a majority vote."""
    return canonical_form(form(answer))


def canonical_form(written: Form) -> str:
    """:func:`canonical` for an answer that is undressed already."""
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
    """Return an answer without what is around it, and the number that it is, if it plainly is one."""
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
        number = number_of(text)
    if number is None:
        text = _SPACE.sub("", text)
        choice = _CHOICE.fullmatch(text)
        text = choice[1] if choice else text
    return Form(text, number)


def number_of(text: str) -> Number | None:
    """Return the number that an undressed answer is; None where it is not plainly one."""
    percent = text.endswith("%")
    text = text.removesuffix("%").rstrip()
    number = _plain_number(text) or _fraction(text) or _scientific(text) or _in_base(text)
    if number is None or not percent:
        return number
    return Number(number.value, number.decimal, percent=True)


def too_much(text: str) -> str | None:
    """Return why an answer is nothing to do algebra with; None where it may be."""
    if len(text) > LONGEST:
        return f"more than {LONGEST} characters"
    depth = deepest = 0
    for character in text:
        if character in "{([":
            depth += 1
            deepest = max(depth, deepest)
        elif character in "})]":
            depth -= 1
    if deepest > DEEPEST:
        return f"brackets more than {DEEPEST} deep"
    for reason, pattern in _HOSTILE.items():
        if pattern.search(text):
            return reason
    for tower in _TOWER.finditer(text):
        middle, top = int(tower[1][:6]), int(tower[2][:6])
        if middle > 1 and (top > 20 or middle**top > POWER):
            return "a tower of powers"
    return None


def _compare_numbers(gold: Number, answer: Number) -> Sameness:
    if gold.percent != answer.percent or (gold.base != answer.base and 10 in (gold.base, answer.base)):
        return Sameness.UNSURE
    if gold.base != answer.base:
        return Sameness.DIFFERENT
    if gold.value == answer.value:
        return Sameness.EQUAL
    if gold.decimal or answer.decimal:
        one, other = Fraction(gold.value), Fraction(answer.value)
        if abs(one - other) <= CLOSE * max(abs(one), abs(other)):
            return Sameness.UNSURE
    return Sameness.DIFFERENT


def _unwrapped(text: str) -> str:
    """Return the text without a full stop and what is around the whole."""
    for _ in range(4):
        before = text
        text = text.strip()
        if not text or (text[-1] != "." and text[0] not in _OPENINGS):
            break
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1].rstrip()
        for opening, closing in _WRAPPERS:
            if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening):
                inner = text[len(opening) : -len(closing)]
                # Not so in \text{a}+\text{b} and $1$, $2$.
                if _is_whole(inner) if closing == "}" else closing not in inner:
                    text = inner
        if text == before:
            break
    return text


def _is_whole(inner: str) -> bool:
    """Return whether no brace in it closes one before it."""
    depth = 0
    for brace in BRACES.finditer(inner):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth < 0:
            return False
    return depth == 0


def _plain_number(text: str) -> Number | None:
    integer = _INTEGER.fullmatch(text)
    if integer is not None and len(text) <= DIGITS:
        value = int(integer[2].replace(",", ""))
        return Number(-value if integer[1] == "-" else value)
    decimal = _DECIMAL.fullmatch(text)
    if decimal is None or len(text) > DIGITS:
        return None
    return _decimal(decimal[1], decimal[2].replace(",", ""), decimal[3] or "", int(decimal[4] or 0))


def _decimal(sign: str, whole: str, places: str, exponent: int) -> Number | None:
    if abs(exponent) > EXPONENT:
        return None
    shift = exponent - len(places)
    value: int | Fraction = int(whole + places or "0")
    value = value * 10**shift if shift >= 0 else Fraction(value, 10**-shift)
    return Number(-value if sign == "-" else value, decimal=bool(places) or exponent < 0)


def _fraction(text: str) -> Number | None:
    if len(text) > DIGITS:
        return None
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
        if not 0 <= value < 1:  # no mixed number
            return None
        value += int(whole)
    return Number(-value if sign == "-" else value)


def _scientific(text: str) -> Number | None:
    if len(text) > DIGITS or (written := _SCIENTIFIC.fullmatch(text)) is None:
        return None
    sign, whole, places, braced, digit = written.groups()
    return _decimal(sign, whole or "1", places or "", int(braced or digit))


def _in_base(text: str) -> Number | None:
    """Return a number in a base, ``1011_2``; its digits stay as they are, in canonical texts too."""
    if len(text) > DIGITS or (written := _BASED.fullmatch(text)) is None:
        return None
    base = int(written[2] or written[3])
    if base < 2 or any(int(digit) >= base for digit in written[1]):
        return None
    return Number(int(written[1]), base=base)
