"""Worker-process side of environments that are functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from megatron_fspo.environments import tools
from megatron_fspo.environments.tools import Answer, Observation
from megatron_fspo.errors import InputError
from megatron_fspo.rewards.grade import LARGEST
from megatron_fspo.rewards.registry import imported
from megatron_fspo.types import Prompt

_LONGEST = 80_000
"""Maximum characters of an answer, up to 12 bytes each as JSON; the rest is cut off."""

_TYPES = {"text": str | None, "forget": bool, "reward": int | float | None, "failed": bool}

Function = Callable[[Prompt, Sequence[str]], Answer]
BUILT_IN: dict[str, Function] = {"calculator": tools.calculator, "python": tools.python}


@cache
def find_function(name: str) -> Function:
    """Return the environment ``name``: built-in, or ``"package.module:function"``. Raises ``InputError``."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        built_in = ", ".join(BUILT_IN)
        raise InputError(f"unknown environment {name!r}: use one of {built_in}, or module:function")
    function: Function = imported(name, "environment", ("prompt", "turns"))
    return function


def answer(name: str, prompt: dict[str, Any], turns: list[str]) -> dict[str, Any]:
    """Call the function and return the :func:`convert_answer` its answer. Exceptions of both propagate."""
    return convert_answer(name, find_function(name)(Prompt(**prompt), turns))


def convert_answer(name: str, said: Any) -> dict[str, Any]:
    """Convert an answer, or the JSON of a tool server, to the fields of an
    :class:`~megatron_fspo.environments.tools.Observation`.

    Raises:
        TypeError: the answer is not an Observation, text, a number or None, or a field has another type.
        ValueError: the reward is too large or NaN, or there is one although the trajectory goes on.
    """
    match said:
        case Observation():
            fields = asdict(said)
        case dict():
            fields = said
        case str() | None:
            fields = {"text": said}
        case _:
            fields = {"reward": said}
    for key, value in fields.items():
        if not isinstance(value, _TYPES.get(key, ())) or (key == "reward" and isinstance(value, bool)):
            raise TypeError(
                f"{name} returned {key} = {value!r:.99}, not text, a number, null or an Observation"
            )
    observed = Observation(**fields)
    if observed.reward is not None and (not abs(observed.reward) <= LARGEST or observed.text is not None):
        wanted = f"from -{LARGEST:g} to {LARGEST:g}, and without a text"
        raise ValueError(f"{name} returned the reward {observed.reward:.9g}: must be {wanted}")
    reward = None if observed.reward is None else float(observed.reward)
    # Lone surrogates have no UTF-8 encoding, and so no tokens.
    text = None if observed.text is None else observed.text[:_LONGEST].encode("utf-8", "replace").decode()
    return asdict(replace(observed, text=text, reward=reward))
