"""Worker-process side of environments that are functions."""

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
"""Maximum characters of an answer; the rest is cut off."""

Function = Callable[[Prompt, Sequence[str]], Answer]
BUILT_IN: dict[str, Function] = {"calculator": tools.calculator, "python": tools.python}


@cache
def function_of(name: str) -> Function:
    """Return the environment ``name``: built-in, or ``"package.module:function"``. Raises ``InputError``."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        built_in = ", ".join(BUILT_IN)
        raise InputError(f"unknown environment {name!r}: use one of {built_in}, or module:function")
    function: Function = imported(name, "environment", ("prompt", "turns"))
    return function


def answer(name: str, prompt: dict[str, Any], turns: list[str]) -> dict[str, Any]:
    """Call the function and return the :func:`fields_of` its answer. Exceptions of both propagate."""
    return fields_of(name, function_of(name)(Prompt(**prompt), turns))


def fields_of(name: str, said: Any) -> dict[str, Any]:
    """Convert an answer to the fields of an :class:`~megatron_fspo.environments.tools.Observation`.

    Raises:
        TypeError: the answer is not an Observation, text, number or None.
        ValueError: the reward is not finite.
    """
    match said:
        case Observation() as observed:
            pass
        case (str() | None) as text:
            observed = Observation(text=text)
        case (int() | float()) as reward:
            observed = Observation(reward=float(reward))
        case other:
            raise TypeError(f"{name} returned a {type(other).__name__}, not text, a number or an Observation")
    if observed.reward is not None and not math.isfinite(observed.reward):
        raise ValueError(f"{name} returned the reward {observed.reward}")
    # Lone surrogates have no UTF-8 encoding, and so no tokens.
    text = None if observed.text is None else observed.text[:_LONGEST].encode("utf-8", "replace").decode()
    return asdict(replace(observed, text=text))
