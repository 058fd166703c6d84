"""Tier 2 of ``math`` in a worker process: math-verify, warmed up when this module is imported."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

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


def compare(gold: str, answer: str) -> tuple[bool, bool]:
    """Return whether math-verify accepts ``answer`` for ``gold``, and whether it could parse ``answer``.

    It is not symmetric (docs/rewards.md). Its own time limits are off, as signals do not interrupt C code.
    """
    if all(map(_WORDS.fullmatch, (gold, answer))):
        # Otherwise each letter is a factor, and "Friday" equals "Fridya".
        gold, answer = rf"\text{{{gold}}}", rf"\text{{{answer}}}"
    parsed = _parsed(answer)
    readable = any(not isinstance(one, str) for one in parsed)
    return bool(verify(_parsed_reference(gold), parsed, timeout_seconds=None)), readable


def _parsed(answer: str) -> list[Any]:
    has_marks = "\\boxed" in answer or re.search(r"(?<!\\)\$", answer)
    whole = answer if has_marks else f"\\boxed{{{_respelt(answer)}}}"
    parsed: list[Any] = parse(whole, parsing_timeout=None)
    return parsed


_parsed_reference = lru_cache(maxsize=64)(_parsed)


def _respelt(answer: str) -> str:
    """Convert ``1.5e3`` and ``2 1/2`` to LaTeX: math-verify reads e as Euler's number, and drops the 2."""
    answer = re.sub(
        r"(?<![\w.])(\d+\.?\d*)[eE]([-+]?\d+)(?![\w.])", r"\1 \\times 10^{\2}", answer, flags=re.ASCII
    )
    return re.sub(r"(?<![\w./])(\d+) +(\d+)/(\d+)(?![\w./])", r"\1\\frac{\2}{\3}", answer, flags=re.ASCII)


# The parser and sympy build tables in their first calls, which take half a second.
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
for _gold, _answer in _EXAMPLES:
    compare(_gold, _answer)
