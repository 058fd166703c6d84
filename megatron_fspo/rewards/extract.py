"""Finds the answer in a response.

The text is a model's: any length, any nesting. What is looked at is bounded: the last few marks, and an
answer of at most ``LONGEST`` characters behind each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

LONGEST = 20_000
"""Characters of an answer; what is longer is none."""
_MARKS = 16  # so many are tried, from the last one back

_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)  # among them escaped characters, which are text
_OPEN = re.compile(r"\s*\{")
_COLON = re.compile(r"nswer[*_\s]{0,8}[:：][*_]*\s*", re.IGNORECASE)
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])(?<![\d)\]]\s)[-+−])?"  # a sign, and no operator between two numbers
    r"(?<![\w.])(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d))(?:[eE][-+]?\d+)?(?:/\d+)?",
    re.ASCII,
)


def extract(response: str, rule: str) -> str | None:
    """Return the answer in ``response`` as it stands, without white space at its ends; None where none is.
    ``rule`` is a value of ``reward.extract``."""
    answer = _RULES[rule](response)
    return answer.strip() or None if answer is not None else None


def boxed(response: str) -> str | None:
    r"""Return what the last ``\boxed{}`` holds whose braces close; of nested ones, the innermost."""
    for start in _from_the_end(response, "\\boxed"):
        opening = _OPEN.match(response, start + len("\\boxed"))
        if opening is None:
            continue
        end = end_of_braces(response, opening.end())
        if end is not None:
            return response[opening.end() : end]
    return None


def end_of_braces(text: str, first: int) -> int | None:
    """Return where the brace before ``first`` is closed; None where it is not, or far away."""
    depth = 1
    for brace in _BRACES.finditer(text, first, first + LONGEST + 1):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return None


def answer_line(response: str) -> str | None:
    """Return the rest of the line behind the last ``Answer:``, or the next line where that is empty."""
    lower, upper = _from_the_end(response, "nswer"), _from_the_end(response, "NSWER")
    for start in sorted([*lower, *upper], reverse=True):
        colon = _COLON.match(response, start)
        before = response[max(0, start - 2) : start]
        if colon is None or before[-1:] not in ("a", "A") or before[:-1].isalnum():
            continue
        line = response[colon.end() : colon.end() + LONGEST + 1].partition("\n")[0]
        return _without_marks(line) if len(line) <= LONGEST else None
    return None


def hashes(response: str) -> str | None:
    """Return the rest of the line behind the last ``####``."""
    start = response.rfind("####")
    if start < 0:
        return None
    rest = response[start + 4 : start + 5 + LONGEST].partition("\n")[0]
    return _without_marks(rest) if len(rest) <= LONGEST else None


def last_number(response: str) -> str | None:
    """Return the last decimal number: with a sign, commas, a point, an exponent or a denominator."""
    for window in (256, LONGEST):
        tail = response[-window:]
        numbers = list(_NUMBER.finditer(tail))
        # One at the very start may have begun before.
        if numbers and (numbers[-1].start() > 0 or len(tail) == len(response)):
            return numbers[-1][0]
    return None


def auto(response: str) -> str | None:
    """Return the last box, else the last answer line, else what follows the last hashes."""
    return _first(response, boxed, answer_line, hashes)


_RULES: dict[str, Callable[[str], str | None]] = {
    "auto": auto,
    "boxed": boxed,
    "answer_line": answer_line,
    "hashes": hashes,
    "last_number": last_number,
    "whole": str,
}


def reference(answer: str) -> str:
    """Return the answer of a data set: what its box holds or follows its hashes (GSM8K), else all of it."""
    return (_first(answer, boxed, hashes) or answer).strip()


def _first(text: str, *rules: Callable[[str], str | None]) -> str | None:
    """Return the answer of the first rule that has one."""
    return next((answer for rule in rules if (answer := rule(text)) and answer.strip()), None)


def _from_the_end(text: str, mark: str) -> Iterator[int]:
    """Yield where ``mark`` stands, from the end, a few times at most."""
    end = len(text)
    for _ in range(_MARKS):
        end = text.rfind(mark, 0, end)
        if end < 0:
            return
        yield end


def _without_marks(line: str) -> str:
    """Return a line without the Markdown around it."""
    line = line.strip()
    for mark in ("**", "__", "*", "`"):
        while line.endswith(mark):
            line = line[: -len(mark)].rstrip()
        while line.startswith(mark):
            line = line[len(mark) :].lstrip()
    return line
