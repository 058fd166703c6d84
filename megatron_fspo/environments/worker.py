"""The side of a worker process: one answer of an environment, which is a function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from megatron_fspo.environments import tools
from megatron_fspo.environments.tools import Answer, Observation
from megatron_fspo.errors import InputError
from megatron_fspo.rewards.registry import imported
from megatron_fspo.types import Prompt

_LONGEST = 100_000
"""Characters of an answer; the rest is cut off."""

Function = Callable[[Prompt, Sequence[str]], Answer]
BUILT_IN: dict[str, Function] = {"calculator": tools.calculator, "python": tools.python}


@cache
def function_of(name: str) -> Function:
    """Return the environment of that name: a built-in one, or ``"package.module:function"``.

    Raises:
        InputError: there is none.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        built_in = ", ".join(BUILT_IN)
        raise InputError(f"no environment is called {name!r}: use one of {built_in}, or module:function")
    function: Function = imported(name, "environment", ("prompt", "turns"))
    return function


def answer(name: str, prompt: dict[str, Any], turns: list[str]) -> dict[str, Any]:
    """Return what the function says, as :func:`fields_of`; raises what that does, and the function."""
    return fields_of(name, function_of(name)(Prompt(**prompt), turns))


def fields_of(name: str, said: Any) -> dict[str, Any]:
    """Return the fields of an :class:`~megatron_fspo.environments.tools.Observation`.

    Raises:
        TypeError: it is none, and no text, number or None.
        ValueError: a reward that is no finite number.
    """
    match said:
        case Observation() as observed:
            pass
        case (str() | None) as text:
            observed = Observation(text=text)
        case (int() | float()) as reward:
            observed = Observation(reward=float(reward))
        case other:
            raise TypeError(f"{name} returned a {type(other).__name__}, no text, number or Observation")
    if observed.reward is not None and not math.isfinite(observed.reward):
        raise ValueError(f"{name} returned the reward {observed.reward}")
    # A lone surrogate has no bytes in UTF-8, and no tokens.
    text = None if observed.text is None else observed.text[:_LONGEST].encode("utf-8", "replace").decode()
    return asdict(replace(observed, text=text))
