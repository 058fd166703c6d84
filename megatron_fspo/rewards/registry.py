"""Rewards by name: the built-in ones, and a user's own as ``"my_module:my_function"``."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from megatron_fspo.errors import InputError
from megatron_fspo.types import Completion, Prompt

Reward = Callable[[Prompt, Completion, str], float]
"""``(prompt, completion, response) -> reward``: ``response`` is the completion's text without its stop token.

The text is what a model wrote: a reward must return for any of it, and soon, and never run it as code.
"""
AnyReward = Callable[[Prompt, Completion, str], "float | Awaitable[float]"]
"""A reward, or an ``async`` one."""

_REWARDS: dict[str, Reward] = {}


class VerifierEntry(NamedTuple):
    """A built-in reward that is no plain function: a :class:`~megatron_fspo.rewards.grader.Grader` has it."""

    factory: str
    """``module:name``; called with the section ``reward`` and the grader's event loop, it returns a
    :class:`~megatron_fspo.rewards.grade.Verifier`."""
    metrics: tuple[str, ...] = ()
    """Names under ``reward/``, of those that the grader can count."""
    package: str = ""
    """The package that the reward needs, as it is imported."""
    extra: str = ""
    """The extra of ours that has the package."""


_ROOM = "megatron_fspo.rewards"
_FAILS = ("timeout_rate", "parse_fail_rate")
VERIFIERS = {
    "format": VerifierEntry(f"{_ROOM}.functions:Format", ("parse_fail_rate",)),
    "http": VerifierEntry(f"{_ROOM}.remote:Remote"),
    "math": VerifierEntry(f"{_ROOM}.math:Mathematics", (*_FAILS, "tier1", "tier2"), "math_verify", "math"),
    "reasoning_gym": VerifierEntry(f"{_ROOM}.gym:ReasoningGym", _FAILS, "reasoning_gym", "gym"),
}
"""By name; one more is a file with its verifier, and a line here."""


def register(name: str) -> Callable[[Reward], Reward]:
    """Register the decorated function as the reward ``name``; ``InputError`` if the name is taken."""
    if not name or ":" in name:
        raise InputError(
            f"a reward's name is not empty and holds no ':' (that is module:function), found {name!r}"
        )
    if name in VERIFIERS:
        raise InputError(f"reward {name!r} is built in")

    def add(reward: Reward) -> Reward:
        if name in _REWARDS:
            raise InputError(f"reward {name!r} is registered twice, first by {_REWARDS[name].__module__}")
        _REWARDS[name] = reward
        return reward

    return add


@register("environment")
def environment(prompt: Prompt, completion: Completion, response: str) -> float:
    """The environment's own reward; 0.0 where a trajectory was cut before its end."""
    return completion.reward or 0.0


@register("exact_match")
def exact_match(prompt: Prompt, completion: Completion, response: str) -> float:
    """1.0 if the response is the answer, white space at both ends aside, else 0.0."""
    return float(response.strip() == prompt.answer.strip())


def get_reward(name: str) -> Reward:
    """Return the reward registered as ``name``, or the function ``"package.module:function"``.

    Modules in the working directory count too. Raises ``InputError`` if there is none. A module that fails
    for any other reason than an import keeps its own traceback, since that is what its author needs.
    """
    if ":" in name:
        reward: Reward = imported(name, "reward", ("prompt", "completion", "response"))
        return reward
    if name in VERIFIERS:
        raise InputError(f"reward {name!r} is no function of its own: a Grader has it")
    if name not in _REWARDS:
        names = sorted([*_REWARDS, *VERIFIERS])
        nearest = difflib.get_close_matches(name, names, n=1)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        raise InputError(
            f"no reward is called {name!r}{hint}: use one of {', '.join(names)},"
            " or module:function for your own"
        )
    return _REWARDS[name]


def imported(path: str, what: str, arguments: Sequence[str]) -> Any:
    """Return the function ``"package.module:function"``, which takes as many positional arguments; ``what``
    names it in messages. Raises ``InputError`` as :func:`get_reward`."""
    module_name, _, attribute = path.partition(":")
    if not module_name or module_name.startswith(".") or not attribute.isidentifier():
        raise InputError(f"{what} {path!r} does not read as package.module:function")
    # The console script has its own folder there instead. Last: a file there hides no module of Python's.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        gone = error.name == module_name.partition(".")[0]
        where = f" in {os.getcwd()} or among what is installed" if gone else ""
        raise InputError(f"{what} {path!r}: cannot import {module_name!r}: {error}{where}") from error
    function = vars(module).get(attribute)
    if not callable(function):
        held = "nothing" if function is None else f"a {type(function).__name__}, not a function,"
        raise InputError(f"{what} {path!r}: module {module_name!r} holds {held} called {attribute!r}")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise InputError(
            f"{what} {path!r} cannot be called with {len(arguments)} positional arguments, "
            f"({', '.join(arguments)}): {error}"
        ) from None
    except ValueError:  # written in C, without a signature
        pass
    return function
