"""Tier 2 of ``math`` in a worker process: math-verify, warmed up when this module is imported."""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

from math_verify import grader, parse, verify
from sympy import Expr, Float, I, Interval, MatrixBase, Pow, Rational, UnevaluatedExpr

from megatron_fspo.rewards.normalise import Number, equal_decimals, form

_EXAMPLES = (
    ("\\frac{1}{2}+\\sqrt{2}", "2^{1/3}"),
    ("[0,1)", "\\{1,2\\}"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&5\\end{pmatrix}"),
    ("\\sin(2x)", "2\\sin(x)\\cos(x)"),
    ("x^2+2x+1", "(x+1)^2"),
    ("x<1", "(-\\infty,1)\\cup(2,3)"),
    ("y=2x+1", "2x+1"),
    ("5\\text{ cm}", "50\\%"),
)


_WORDS = re.compile(r"[A-Za-z]{4,}|[A-Za-z]{2,}(?:[ '-][A-Za-z]{2,})+")
"""Answers that look like text; a single short word may be a product (``xy``)."""
_CHOICE_AND_TEXT = re.compile(r"(?:\\text(?:bf)?\{)?[(\[]?([A-J])[)\].:]+[\s}]*[^\s}].*", re.DOTALL)
_RELATION = re.compile(
    r"(?<![<>!=\\]):?=(?!=)|\\(?:approx|thickapprox|simeq|cong|equiv|doteq|sim)(?![a-zA-Z])|≈"
)
_NAMED = re.compile(r"\s*([^\d=<>,;+*/^-][^=<>,;+*/^-]{0,20})=([^=<>,;]+)")
_LIST = re.compile(r"[,;]|\\text|\\(?:lor|vee|cup|quad|qquad|\\)(?![a-zA-Z])")
_CUT = re.compile(
    r"\\(?:to|(?:long)?(?:left)?rightarrow|(?:Left)?Rightarrow|implies|iff|propto|mid|[bp]?mod)(?![a-zA-Z])|//"
    r"|\\text\{[^}]*(?:\(|\b(?:not|wrong|incorrect|false|never)\b)"
)
"""What the parser cuts an answer at, keeping one side of it."""
_DOTS = re.compile(r"\\[lcvd]?dots(?![a-zA-Z])|…|\.\.\.")
_SAMPLES = tuple(Rational(top, 7) for top in (-20, -9, -4, 2, 5, 13, 19, 31))


def compare(gold: str, answer: str) -> tuple[bool, bool]:
    """Return whether ``answer`` equals ``gold``, and whether it could be parsed.

    math-verify decides, with an exact comparison of numbers, chains of equations, choices with their text.
    It is not symmetric (docs/rewards.md). Its own time limits are off: signals do not interrupt C code.
    """
    choice = _CHOICE_AND_TEXT.fullmatch(answer.strip())
    if choice and (letter := form(gold).text) in [*"ABCDEFGHIJ"]:
        return choice[1] == letter, True
    named, other = _NAMED.fullmatch(gold), _NAMED.fullmatch(answer)
    if named and other and "".join(named[1].split()) == "".join(other[1].split()):
        gold, answer = named[2], other[2]
    elif named and not _RELATION.search(answer):
        gold = named[2]
    if all(map(_WORDS.fullmatch, (gold, answer))):
        # Otherwise each letter is a factor, and "Friday" equals "Fridya".
        gold, answer = rf"\text{{{gold}}}", rf"\text{{{answer}}}"
    dots = {bool(_DOTS.search(text)) for text in (gold, answer)}
    if len(dots) > 1 or (_CUT.search(re.sub(r"_\{[^{}]*\}", "", answer)) and not _CUT.search(gold)):
        return False, False
    sides = _sides(gold, answer)
    numbers = pairwise(side.number for side in sides if side.number)
    if not all(equal_decimals(before, after, places=1) for before, after in numbers):
        return False, True
    return any(_equal(_reference(gold), side) for side in sides), bool(sides) and sides[-1].readable


class _Side:
    """A side of an equation, or a whole answer."""

    def __init__(self, text: str) -> None:
        number = form(text).number
        self.is_plain = number is not None and number.base == 10 and not number.percent
        self.parsed = _parsed(text)
        self.readable = any(not isinstance(parsed, str) for parsed in self.parsed)
        self.number = number if self.is_plain else _number(self.parsed[0] if self.parsed else None)


_reference = lru_cache(maxsize=64)(_Side)


def _sides(gold: str, answer: str) -> list[_Side]:
    """Split ``2 + 3 = 5`` and longer chains; also ``x = 5``, unless the reference is an equation."""
    texts = [text.strip().removesuffix(".") for text in _RELATION.split(answer) if text.strip()]
    if len(texts) < 2 or _LIST.search(answer):
        return [_Side(answer)]
    sides = [_Side(text) for text in texts]
    if len(texts) > 2 or sides[0].number:
        return sides
    whole = " = ".join(texts)
    named = sides[-1:] if _NAMED.fullmatch(whole) else []
    return [_Side(whole)] if _RELATION.search(gold) else named


def _equal(gold: _Side, answer: _Side) -> bool:
    """Return whether math-verify accepts the answer, or it is a number, vector or function that equals the
    reference in another form."""
    if gold.number and answer.number and (gold.is_plain or answer.is_plain):
        return equal_decimals(gold.number, answer.number)
    if verify(gold.parsed, answer.parsed, timeout_seconds=None):
        return True
    if not gold.parsed or not answer.parsed:
        return False
    one, other = (_vector(side.parsed[0]) for side in (gold, answer))
    if one and other:
        return len(one) == len(other) and all(
            verify([a], [b], timeout_seconds=None) for a, b in zip(one, other, strict=True)
        )
    return _equal_functions(gold.parsed[0], answer.parsed[0])


def _vector(expression: Any) -> list[Any]:
    """Return the elements of a vector, or of a pair, which math-verify reads as an interval."""
    if isinstance(expression, Interval) and expression.left_open and expression.right_open:
        return [expression.start, expression.end]
    return list(expression) if isinstance(expression, MatrixBase) and 1 in expression.shape else []


def _equal_functions(one: Any, other: Any) -> bool:
    """Return True if two expressions in one variable are equal where they are real, and real at the same
    places; or if they are equal with i as the imaginary unit."""
    if not (isinstance(one, Expr) and isinstance(other, Expr)):
        return False
    symbols = one.free_symbols | other.free_symbols
    if units := [symbol for symbol in symbols if symbol.name == "i"]:
        return bool(verify(*([value.subs(units[0], I)] for value in (one, other)), timeout_seconds=None))
    if len(symbols) != 1 or one.free_symbols != other.free_symbols or not one.has(Pow):
        return False
    values = [[_number(value.subs(*symbols, at)) for value in (one, other)] for at in _SAMPLES]
    real = [(first, second) for first, second in values if first or second]
    return len(real) > 2 and all(a and b and equal_decimals(a, b) for a, b in real)


def _number(expression: Any) -> Number | None:
    """Return the value of a real number: exact if it is rational, else to 40 digits, with decimals to 7."""
    if not isinstance(expression, Expr) or not expression.is_number or expression.has(UnevaluatedExpr):
        return None  # among others, percentages
    expression = grader.safe_sympy_doit(expression)
    if isinstance(expression, Rational):
        return Number(Fraction(int(expression.p), int(expression.q)))
    try:
        value = expression.evalf(50)
        if not (value.is_real and value.is_finite):
            return None
        exact = Fraction(str(value))
    except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError):
        return None
    return Number(exact, step=min(abs(exact), Fraction(1)) / 10 ** (7 if expression.has(Float) else 40))


def _numeric_eq(one: Any, other: Any, *how: Any) -> bool:
    first, second = _number(one), _number(other)
    return equal_decimals(first, second) if first and second else _within_limits(one, other, *how)


_within_limits = grader.sympy_numeric_eq
# Its limit is absolute. It also compares what is in sets, tuples, intervals and matrices.
grader.sympy_numeric_eq = _numeric_eq


def _parsed(answer: str) -> list[Any]:
    if re.fullmatch(r"\s*\$[^$]+\$(?:\s*(?:,|;|and|or)?\s*\$[^$]+\$)+\s*", answer):
        answer = re.sub(r"\$\s*(?:,|;|and|or)?\s*\$", ", ", answer).replace("$", "")  # it reads the last one
    has_marks = "\\boxed" in answer or re.search(r"(?<!\\)\$", answer)
    whole = answer if has_marks else f"\\boxed{{{_respelt(answer)}}}"
    parsed: list[Any] = parse(whole, parsing_timeout=None)
    return parsed


def _respelt(answer: str) -> str:
    """Convert ``1.5e3``, ``2 1/2`` and ``\\lor`` to LaTeX that math-verify reads whole."""
    sets = "" if re.search(r"[\[({]", answer) else "|cup"
    answer = re.sub(rf"\\(?:lor|vee{sets})(?![a-zA-Z])", r"\\text{ or }", answer)
    answer = re.sub(
        r"(?<![\w.])(\d+\.?\d*)[eE]([-+]?\d+)(?![\w.])", r"\1 \\times 10^{\2}", answer, flags=re.ASCII
    )
    return re.sub(r"(?<![\w./])(\d+) +(\d+)/(\d+)(?![\w./])", r"\1\\frac{\2}{\3}", answer, flags=re.ASCII)


# The parser and sympy build tables in their first calls, which take half a second.
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
for _gold, _answer in _EXAMPLES:
    compare(_gold, _answer)
