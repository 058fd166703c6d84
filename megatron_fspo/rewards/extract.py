"""Extracts the answer from a response.

Responses may be hostile: only the last few marks are tried, with answers of at most ``LONGEST`` characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

LONGEST = 20_000
"""Maximum characters of an answer; longer ones count as no answer."""
_MARKS = 16  # marks to try, from the last one back

_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)  # escaped characters match as a whole, as they are text
_OPEN = re.compile(r"\s*\{")
_BARE = re.compile(r"\s+[-+−]?\w[\w.,/]*(?<=\w)|[-+−]?\d[\d.,/]*(?<=\d)")
_BETWEEN = re.compile(r"[\s$]{0,9}(?:[,;&]|and|or|,\s?and|\\text\{\s?(?:and|or)\s?\})?[\s$]{0,9}")
_COLON = re.compile(r"nswer[*_\s]{0,8}[:：][*_]*\s*", re.IGNORECASE)
_ANSWER_IS = re.compile(r"\A\s*(?:the )?(?:final )?answer is:?\s*", re.IGNORECASE)
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])(?<![\d)\]]\s)[-+−])?"  # a sign, not an operator between two numbers
    r"(?<![\w.])(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d))(?:[eE][-+]?\d+)?(?:/\d+)?",
    re.ASCII,
)


def after_thinking(prompt: str, response: str, end: str) -> str:
    """Return what follows the last ``end`` of thinking in a response; "" if its thinking has not ended.

    Thinking begins at ``end`` without its slash, in the response or the prompt; "": nothing marks it.
    """
    if not end:
        return response
    _, found, answer = response.rpartition(end)
    if found:
        return answer
    begin = end.replace("/", "", 1)
    text = prompt + response
    return response if begin == end or text.rfind(begin) <= text.rfind(end) else ""


def extract(response: str, rule: str) -> str | None:
    """Return the answer in ``response``, stripped of white space but not normalised; None if there is none.
    ``rule`` is a value of ``reward.extract``."""
    answer = _RULES[rule](response)
    return answer.strip() or None if answer is not None else None


def boxed(response: str) -> str | None:
    r"""Return the content of the last ``\boxed{}`` or ``\fbox{}`` that closes; if nested, of the innermost
    one. Boxes before it that only a comma, a semicolon, "and" or "or" separates from it belong to the answer:
    all are returned, separated by commas."""
    answers: list[str] = []
    after, marks = len(response), ("\\boxed", "\\fbox")
    boxes = [(start, mark) for mark in marks for start in _from_the_end(response, mark)]
    for start, mark in sorted(boxes, reverse=True):
        opening = _OPEN.match(response, start + len(mark))
        first = opening.end() if opening else start + len(mark)
        bare = _BARE.match(response, first) if opening is None else None
        end = end_of_braces(response, first) if opening else bare and bare.end()
        if end is None:
            continue
        if answers and not _BETWEEN.fullmatch(response, end + bool(opening), after):
            break
        after, answer = start, response[first:end].strip()
        if not (answer or answers):
            return None
        answers = answers if answer in answers else [answer, *answers]
    answer = ", ".join(filter(None, answers))
    return answer if 0 < len(answer) <= LONGEST else None


def end_of_braces(text: str, first: int) -> int | None:
    """Return where the brace before ``first`` closes; None if not within ``LONGEST`` characters."""
    depth = 1
    for brace in _BRACES.finditer(text, first, first + LONGEST + 1):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return None


def answer_line(response: str) -> str | None:
    """Return the rest of the line after the last ``Answer:``; if that is empty, the next line with text."""
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
    """Return the rest of the line after the last ``####``."""
    start = response.rfind("####")
    if start < 0:
        return None
    rest = response[start + 4 : start + 5 + LONGEST].partition("\n")[0]
    return _without_marks(rest) if len(rest) <= LONGEST else None


def last_number(response: str) -> str | None:
    """Return the last decimal number, with sign, commas, point, exponent or denominator if any."""
    for window in (256, LONGEST):
        tail = response[-window:]
        numbers = list(_NUMBER.finditer(tail))
        # A number at the start of the window may have begun before it.
        if numbers and (numbers[-1].start() > 0 or len(tail) == len(response)):
            return numbers[-1][0]
    return None


def auto(response: str) -> str | None:
    """Return the content of the last box, else the last answer line, else the text after the last hashes."""
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
    """Return the reference in an answer field of a data set: in a box, after hashes (GSM8K), or all of it."""
    whole = (_first(answer, boxed, hashes) or answer).strip()
    return _ANSWER_IS.sub("", whole)


def _first(text: str, *rules: Callable[[str], str | None]) -> str | None:
    return next((answer for rule in rules if (answer := rule(text)) and answer.strip()), None)


def _from_the_end(text: str, mark: str) -> Iterator[int]:
    """Yield positions of ``mark`` from the end of the text, at most ``_MARKS`` of them."""
    end = len(text)
    for _ in range(_MARKS):
        end = text.rfind(mark, 0, end)
        if end < 0:
            return
        yield end


def _without_marks(line: str) -> str:
    line = line.strip()
    for mark in ("**", "__", "*", "`"):
        while line.endswith(mark):
            line = line[: -len(mark)].rstrip()
        while line.startswith(mark):
            line = line[len(mark) :].lstrip()
    return line
