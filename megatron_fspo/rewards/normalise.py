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
PLACES = 6
"""A decimal with as many places, or significant digits below 1, may be a number that it rounds or cuts."""


@dataclass(frozen=True)
class Number:
    value: int | Fraction
    step: Fraction | None = None
    """What one in the last place of a decimal is worth, which may be rounded; None: not a decimal."""
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
    (re.compile(r"\\[cd]?dots(?![a-zA-Z])|…|\.\.\."), r"\\ldots"),
    (re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(r"\\(?:leq|geq|neq)(?![a-zA-Z])"), lambda m: m[0][:3]),
)
_SPACE = re.compile(r"\s+(?=[^\w\s\\])|(?<=[^\w\s])\s+")
_PLAIN = str.maketrans({"−": "-", "–": "-", **dict.fromkeys("\u00a0\u2007\u2009\u202f", " ")})
_UNITS = frozenset(
    "mm cm km ft yd mi kg mg lb oz ml hr hrs min sec ms Hz kHz MHz GHz kW kJ mph per men day".split()
)
_NO_UNITS = frozenset(
    "or and to is are was not mod vs if than times plus minus over pi sqrt sin cos tan log ln exp choose base"
    " factorial dozen hundred thousand million billion trillion half halves thirds percent wrong incorrect"
    " false never".split()
)
_SIGN = r"([-+]?)\s*"
_DECIMAL = re.compile(
    _SIGN + r"(?=\.?\d)(\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d{1,2}(?:,\d\d)+,\d{3}|\d*)"
    r"(?:\.(\d*))?(?:[eE]([-+]?\d{1,4}))?",
    re.ASCII,
)
_COMMA_DECIMAL = re.compile(r"[-+]?\d{1,3}(?:\.\d{3})+,\d+", re.ASCII)
_REPEATING = re.compile(  # 0.1\overline{6}, 0.1(6), 0.\dot{1}4285\dot{7}, 0.1666...
    _SIGN + r"(\d*)\.(\d*?)(?:(\\dot\s*\{?\d\}?\d*\\dot\s*\{?\d\}?)"
    r"|(\\(?:overline|bar|dot)\s*(?:\{\s*\d+\s*\}|\d)|\(\d+\))"
    r"|(\d)\6{2,}\s*(?:\.{2,3}|\\[lc]?dots|…)|(\d{2,}?)\7+\s*(?:\.{2,3}|\\[lc]?dots|…))",
    re.ASCII,
)
_QUANTITY = re.compile(
    r"(.{0,80}?[\d})])\s*(?:(\\(?:text|textrm|mathrm|mbox|rm|operatorname))\s*\{)?\s*\(?"
    r"([a-zA-Z°µ][a-zA-Z°µ /·.-]{0,40}?)\)?\s*\}?\s*(?:\^\s*\{?-?\d\}?)?"
)
_SLASH = re.compile(_SIGN + r"(?:(\d+)\s+)?(\d+)\s*/\s*(\d+)", re.ASCII)
_FRACTION = re.compile(
    _SIGN + r"(\d*)\s*\\frac\s*(?:\{\s*([-+]?\d+)\s*\}|(\d))\s*(?:\{\s*([-+]?\d+)\s*\}|(\d))", re.ASCII
)
_TIMES = r"\s*(?:\\times|\\cdot|[×·*])\s*"
_SCIENTIFIC = re.compile(
    _SIGN + rf"(?:(\d+)(?:\.(\d+))?{_TIMES})?10\s*\^\s*(?:\{{\s*([-+]?\d{{1,4}})\s*\}}|(-\d{{1,4}}|\d))",
    re.ASCII,
)
_BASED = re.compile(r"([0-9]+)\s*_\s*(?:\{\s*(\d{1,2})\s*\}|(\d{1,2}))", re.ASCII)
_CHOICE = re.compile(r"[(\[]?([A-J])[)\].:]*")
_CHOICES = re.compile(r"[A-J](?:(?:,|;|and|\s)*[A-J])+")
_DATE = re.compile(r"\d{4}-\d\d-\d\d|\d{1,2}/\d{1,2}/\d{4}", re.ASCII)
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
    if _CHOICES.fullmatch(gold.text) and _CHOICES.fullmatch(answer.text):
        return _letters(gold.text) == _letters(answer.text)
    if _DATE.fullmatch(gold.text) or _DATE.fullmatch(answer.text):
        return gold.text == answer.text
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
    if _CHOICES.fullmatch(written.text):
        return ",".join(_letters(written.text))
    return written.text.lower() if _WORDS.fullmatch(written.text) else written.text


def form(answer: str) -> Form:
    """Return an answer without surrounding markup, and its number if it is a plain one."""
    if len(answer) > LONGEST:
        return Form(answer.strip(), None)
    text = answer.strip().translate(_PLAIN)
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
            number = _formula(bare) or _quantity(bare)
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
    return None if equal_decimals(gold, answer) else False  # votes must not merge 1/3 and 0.333333


def equal_decimals(one: Number, other: Number, places: int = PLACES) -> bool:
    """Return True if two numbers are equal, if the coarser decimal, of at least ``places``, is the other one,
    rounded or cut, or if they differ by no more than the rounding of a double."""
    first, second = Fraction(one.value), Fraction(other.value)
    difference, step = abs(first - second), max(one.step or 0, other.step or 0)
    if not difference or not step:
        return not difference
    coarser, finer = (first, second) if one.step == step else (second, first)
    rounded = 2 * difference <= step or (difference < step and abs(coarser) < abs(finer))
    return (rounded and step * 10**places <= min(1, 10 * abs(coarser))) or difference <= abs(first) / 2**50


def _letters(text: str) -> list[str]:
    return sorted(re.findall("[A-J]", text))


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
    if len(text) > DIGITS:
        return None
    if _COMMA_DECIMAL.fullmatch(text):
        text = text.replace(".", "").replace(",", ".")
    if (written := _DECIMAL.fullmatch(text)) is None:
        return None
    sign, whole, places, exponent = written.groups()
    return _decimal(sign, whole.replace(",", "").replace(" ", ""), places or "", int(exponent or 0))


def _decimal(sign: str, whole: str, places: str, exponent: int) -> Number | None:
    if abs(exponent) > EXPONENT:
        return None
    shift = exponent - len(places)
    value: int | Fraction = int(whole + places or "0")
    value = value * 10**shift if shift >= 0 else Fraction(value, 10**-shift)
    step = Fraction(1, 10**-shift) if shift < 0 else None
    return Number(-value if sign == "-" else value, step)


def _quantity(text: str) -> Number | None:
    """Return the number before a unit or a counted noun: ``3 \\text{ cm}^2``, ``18 miles per hour``."""
    if (written := _QUANTITY.fullmatch(text)) is None:
        return None
    number, marked, unit = written.groups()
    for word in re.findall("[a-zA-Z]+", unit):
        is_unit = (
            marked or len(word) > 3 or word in _UNITS or (len(word) == 1 and ("/" in unit or "^" in number))
        )
        if word.lower() in _NO_UNITS or not is_unit:
            return None
    return _plain_number(number) or _formula(number)


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
    if (repeating := _REPEATING.fullmatch(text)) is not None:
        sign, whole, places, *periods = repeating.groups()
        period = re.sub(r"\D", "", next(filter(None, periods)))
        exact = int(whole + places + period) - int(whole + places or "0")
        value = Fraction(exact, 10 ** len(places) * (10 ** len(period) - 1))
        return Number(-value if sign == "-" else value)
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
