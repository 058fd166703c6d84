"""The tools that are built in, as environments: functions of the prompt's row and of the policy's turns.

A call ends a turn, so ``rollout.stop`` has its closing mark; the token that completes the mark may have more
characters, as ``><`` has. A turn without a call is the last one, and the run's reward grades it.
"""

from __future__ import annotations

import ast
import contextlib
import io
import math
import operator
import os
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_fspo.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What an environment answers, where text or a number alone does not say it."""

    text: str | None = None
    """What is inserted before the next turn; None: the trajectory ends."""
    forget: bool = False
    """The next turn reads the prompt and this text (a summary, say), and nothing of the turns before. It
    stands behind the prompt as it is, without the marks of ``environment.role``."""
    reward: float | None = None
    """Of the trajectory, at its end; None: the run's reward grades it."""
    failed: bool = False
    """A tool failed; the share of such answers is a metric."""


Answer = Observation | str | float | None
"""Text to insert; a number: the end, with this reward; None: the end, without one."""

_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_LONGEST = 200
"""Characters of a formula."""
_PRINTED = 20_000
"""Characters of what a program printed."""


def calculator(prompt: Prompt, turns: Sequence[str]) -> Answer:
    """``<calc>12 * (3 + 4)</calc>`` is followed by ``<result>84</result>``: + - * / // % of numbers."""
    formula = _call(turns[-1], "calc")
    if formula is None:
        return None
    try:
        return Observation(text=f"<result>{_number(formula):.12g}</result>")
    except (ValueError, ArithmeticError, SyntaxError, MemoryError, RecursionError) as error:
        return Observation(text=f"<result>error: {error}</result>", failed=True)


def python(prompt: Prompt, turns: Sequence[str]) -> Answer:
    """``<python>print(2 ** 10)</python>`` is followed by ``<output>1024</output>``: what the program printed,
    and the last line of its traceback. It begins no process, opens no connection and no file to write, by
    Python's own means: that keeps accidents in, and is no wall against an attack."""
    program = _call(turns[-1], "python")
    if program is None:
        return None
    os.environ.clear()  # keys of the run are nobody's business
    printed, problem = io.StringIO(), ""
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            exec(compile(program.strip(), "<python>", "exec"), {"__name__": "__main__"})
        except BaseException as error:  # SystemExit is the program's
            problem = traceback.format_exception_only(error)[-1]
    return Observation(
        text=f"<output>{printed.getvalue()[:_PRINTED]}{problem}</output>", failed=bool(problem)
    )


def _call(turn: str, name: str) -> str | None:
    """What stands in the last call of the turn; None: there is none."""
    calls = re.findall(rf"<{name}>(.*?)</{name}>", turn, re.DOTALL)
    return calls[-1] if calls else None


def _number(formula: str) -> float:
    if len(formula) > _LONGEST:
        raise ValueError(f"more than {_LONGEST} characters")
    value = _value(ast.parse(formula.strip(), mode="eval").body)
    if not math.isfinite(value):
        raise ValueError("the result is not finite")
    return value


def _value(node: ast.AST) -> float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
    raise ValueError("not a formula of numbers and + - * / // % ( )")
