"""Built-in tools as environments: functions of the prompt's row and the policy's turns.

A call ends a turn, so ``rollout.stop`` needs its closing mark. The token that completes the mark may have
further characters, such as ``><``. A turn without a call is the last one, and the run's reward grades it.
"""

from __future__ import annotations

import ast
import contextlib
import io
import math
import operator
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_fspo.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Observation:
    """An environment's reply, if text or a number alone is not enough."""

    text: str | None = None
    """Text to insert before the next turn; None: the trajectory ends."""
    forget: bool = False
    """Replace the context: the next turn reads only the prompt and this text (a summary, for example), which
    follows the prompt without the marks of ``environment.role``."""
    reward: float | None = None
    """Reward of the trajectory, at its end; None: the run's reward grades it."""
    failed: bool = False
    """A tool failed; ``environment/failed`` is the share of such replies."""


Answer = Observation | str | float | None
"""Text to insert; a number: the trajectory ends with this reward; None: it ends without one."""

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
"""Maximum characters of a formula."""
_PRINTED = 20_000
"""Maximum characters of a program's output."""


def calculator(prompt: Prompt, turns: Sequence[str]) -> Answer:
    """Reply ``<result>84</result>`` to ``<calc>12 * (3 + 4)</calc>``. Supports + - * / // % of numbers."""
    formula = _call(turns[-1], "calc")
    if formula is None:
        return None
    try:
        return Observation(text=f"<result>{_number(formula):.12g}</result>")
    except (ValueError, ArithmeticError, SyntaxError, MemoryError, RecursionError) as error:
        return Observation(text=f"<result>error: {error}</result>", failed=True)


def python(prompt: Prompt, turns: Sequence[str]) -> Answer:
    """Reply ``<output>1024</output>`` to ``<python>print(2 ** 10)</python>``: the program's output and the
    last line of its traceback. The worker has neither our environment variables nor the prompt, and blocks
    Python functions that start processes, open connections or write files. That prevents accidents, not
    attacks."""
    program = _call(turns[-1], "python")
    if program is None:
        return None
    printed, problem = _Output(), ""
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            exec(compile(program.strip(), "<python>", "exec"), {"__name__": "__main__"})
        except BaseException as error:  # including SystemExit
            problem = traceback.format_exception_only(error)[-1]
    return Observation(text=f"<output>{printed.getvalue()}{problem}</output>", failed=bool(problem))


class _Output(io.StringIO):
    """Keeps what is printed up to a limit."""

    def write(self, text: str) -> int:
        super().write(text[: _PRINTED - self.tell()])
        return len(text)


def _call(turn: str, name: str) -> str | None:
    """Return the content of the last call in the turn; None if there is none."""
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
