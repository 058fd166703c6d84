"""reasoning_gym's scorers in a worker process, prevented from executing model output.

Of the 106 tasks of version 0.1.25, those in ``LITERAL`` pass the answer to ``eval``; they expect literals, so
``ast.literal_eval`` replaces it. Those in ``FORMULA`` pass it to sympy's ``parse_expr``, which evaluates it;
they expect formulas, so answers with attributes, strings or unknown names are rejected.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import reasoning_gym
import sympy
from reasoning_gym.factory import DATASETS
from sympy.parsing import sympy_parser

LITERAL = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
FORMULA = tuple(
    "countdown puzzle24 intermediate_integration polynomial_multiplication simple_integration".split()
)
_SIGNS = re.compile(r"[\w\s+\-*/^().,!|]*", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_NAMES = frozenset(
    "Abs E I Integer Rational C acos acosh acot acsc asec asin asinh atan atan2 atanh cos cosh cot coth csc"
    " csch erf exp factorial ln log oo pi sec sech sign sin sinh sqrt tan tanh".split()
)


class BadRowError(Exception):
    """The scorer fails on the row's own answer."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"cannot score the row's own answer: {type(error).__name__}: {error}")


def score(row: str, answer: str) -> tuple[float, bool]:
    """Return the score of an extracted answer, and whether the scorer could read it. ``row`` is JSON of
    ``task``, ``config``, ``metadata`` and ``answer``, as ``gym_rows`` writes them; raises ``BadRowError`` if
    it is invalid."""
    fields = json.loads(row)
    try:
        scorer = _scorer(fields["task"], _text(fields["config"]))
        own = fields["answer"] or None  # some tasks have no single answer
        entry = {"answer": own, "metadata": rich(json.loads(_text(fields["metadata"])))}
    except Exception as error:
        raise BadRowError(error) from error
    try:
        return scorer(answer, entry), True
    except (MemoryError, RecursionError):
        raise
    except Exception as error:
        # Some scorers raise for invalid answers. If it raises for the right one too, the row is wrong.
        try:
            if own is not None:
                scorer(own, entry)
        except Exception:
            raise BadRowError(error) from error
        return 0.0, False


def rich(value: Any) -> Any:
    """Decode what ``gym_rows`` encoded as JSON types."""
    if isinstance(value, list):
        return [rich(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__tuple__"}:
        return tuple(rich(item) for item in value["__tuple__"])
    if value.keys() == {"__set__"}:
        return {rich(item) for item in value["__set__"]}
    if value.keys() == {"__dict__"}:
        return {rich(key): rich(item) for key, item in value["__dict__"]}
    return {key: rich(item) for key, item in value.items()}


def check_formula(text: str) -> None:
    """Raise ``ValueError`` unless the text has only numbers, signs, brackets, letters and known functions."""
    names = [name for name in _NAME.findall(text) if len(name) > 1 and name not in _NAMES]
    # The e5 of 1e5 matches as a name too, but is harmless.
    unknown = [name for name in names if not re.fullmatch(r"[eE]\d+", name)]
    if not _SIGNS.fullmatch(text) or re.search(r"\.\s*[A-Za-z_]", text) or unknown or "__" in text:
        raise ValueError("not a formula")


def _text(field: Any) -> str:
    return field if isinstance(field, str) else json.dumps(field)


@lru_cache(maxsize=256)
def _scorer(task: str, config: str) -> Callable[[str, dict[str, Any]], float]:
    _guard()
    scorer: Callable[[str, dict[str, Any]], float] = reasoning_gym.create_dataset(
        task, **rich(json.loads(config))
    ).score_answer
    return scorer


@cache
def _guard() -> None:
    """Replace ``eval`` and ``parse_expr`` in the scorers that use them, once per process."""
    parse = sympy_parser.parse_expr

    def parse_formula(text: str, *args: Any, **kwargs: Any) -> Any:
        check_formula(text)
        return parse(text, *args, **kwargs)

    for task in LITERAL:
        vars(sys.modules[DATASETS[task][0].__module__])["eval"] = ast.literal_eval
    for task in FORMULA:
        names = vars(sys.modules[DATASETS[task][0].__module__])
        if "parse_expr" in names:
            names["parse_expr"] = parse_formula
    sympy.parse_expr = parse_formula
