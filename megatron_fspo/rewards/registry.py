"""Looks up rewards by name: built-in ones, or a user's as ``"my_module:my_function"``."""

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

A model wrote the text, so a reward must return quickly for any text and never execute it.
"""
AnyReward = Callable[[Prompt, Completion, str], "float | Awaitable[float]"]
"""A plain or ``async`` reward."""

_REWARDS: dict[str, Reward] = {}


class VerifierEntry(NamedTuple):
    """A built-in reward that is not a function; runs in a :class:`~megatron_fspo.rewards.grader.Grader`."""

    factory: str
    """``module:name``, called with the ``reward`` section and the grader's event loop; returns a
    :class:`~megatron_fspo.rewards.grade.Verifier`."""
    metrics: tuple[str, ...] = ()
    """The grader's metrics, under ``reward/``, that apply to it."""
    package: str = ""
    """Module of a package that the reward needs."""
    extra: str = ""
    """Extra of this package that installs it."""


_ROOM = "megatron_fspo.rewards"
_FAILS = ("timeout_rate", "parse_fail_rate")
VERIFIERS = {
    "format": VerifierEntry(f"{_ROOM}.grader:Format", ("parse_fail_rate",)),
    "http": VerifierEntry(f"{_ROOM}.remote:Remote"),
    "math": VerifierEntry(f"{_ROOM}.math:Mathematics", (*_FAILS, "tier1", "tier2"), "math_verify", "math"),
    "reasoning_gym": VerifierEntry(f"{_ROOM}.gym:ReasoningGym", _FAILS, "reasoning_gym", "gym"),
}
"""Name → entry. To add a reward, write a module with its verifier and add a line here."""


def register(name: str) -> Callable[[Reward], Reward]:
    """Register the decorated function as the reward ``name``; ``InputError`` if the name is taken."""
    if not name or ":" in name:
        raise InputError(
            f"reward name {name!r}: must not be empty or contain ':', which marks module:function"
        )
    if name in VERIFIERS:
        raise InputError(f"reward {name!r} is built in: register another name")

    def add(reward: Reward) -> Reward:
        if name in _REWARDS:
            raise InputError(f"reward {name!r} is registered twice, first by {_REWARDS[name].__module__}")
        _REWARDS[name] = reward
        return reward

    return add


def set_reward(name: str, reward: Reward) -> None:
    """Register a user's function, in place of an earlier one; ``InputError`` for a built-in's name."""
    if name in _REWARDS and not built_in(name):
        del _REWARDS[name]
    register(name)(reward)


@register("environment")
def environment(prompt: Prompt, completion: Completion, response: str) -> float:
    """Return the environment's reward; 0.0 if the trajectory was cut before its end."""
    return completion.reward or 0.0


@register("exact_match")
def exact_match(prompt: Prompt, completion: Completion, response: str) -> float:
    """Return 1.0 if the response equals the answer, ignoring white space at both ends, else 0.0."""
    return float(response.strip() == prompt.answer.strip())


def get_reward(name: str) -> Reward:
    """Return the reward registered as ``name``, or the function ``"package.module:function"``.

    Also searches the working directory for modules. Raises ``InputError`` if there is none. Other errors than
    ``ImportError`` inside the module propagate with their traceback.
    """
    if ":" in name:
        reward: Reward = imported(name, "reward", ("prompt", "completion", "response"))
        return reward
    if name in VERIFIERS:
        raise InputError(f"reward {name!r} is not a function: use a Grader")
    if name not in _REWARDS:
        names = sorted([*_REWARDS, *VERIFIERS])
        nearest = difflib.get_close_matches(name, names, n=1)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        raise InputError(
            f"unknown reward {name!r}{hint}: use one of {', '.join(names)}, or module:function for your own"
        )
    return _REWARDS[name]


def built_in(name: str) -> bool:
    """Return True unless the reward is a user's."""
    return name in VERIFIERS or (":" not in name and get_reward(name).__module__.startswith("megatron_fspo."))


def find_module(name: str) -> str:
    """Return the module that has or registers the reward. Raises ``InputError`` as :func:`get_reward`, and if
    another process could not import the module."""
    reward = get_reward(name)
    module = name.partition(":")[0] if ":" in name else reward.__module__
    if getattr(sys.modules[module], "__spec__", None) is None or module == "__main__":
        raise InputError(f"reward {name!r}: its process cannot import {module!r}: set reward.in_process")
    return module


def imported(path: str, what: str, arguments: Sequence[str]) -> Any:
    """Return the function ``"package.module:function"`` after checking that it accepts these positional
    arguments. ``what`` names it in messages. Raises ``InputError`` as :func:`get_reward`."""
    module_name, _, attribute = path.partition(":")
    if not module_name or module_name.startswith(".") or not attribute.isidentifier():
        raise InputError(f"{what} {path!r}: must have the form package.module:function")
    # A console script lacks the working directory. Last, so that its files do not hide installed modules.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        gone = error.name == module_name.partition(".")[0]
        where = f" in {os.getcwd()} or among installed packages" if gone else ""
        raise InputError(f"{what} {path!r}: cannot import {module_name!r}: {error}{where}") from error
    except SyntaxError as error:
        file = os.path.relpath(error.filename) if error.filename else module_name
        raise InputError(f"{file}:{error.lineno}: {error.msg} ({what} {path!r})") from None
    function = vars(module).get(attribute)
    if not callable(function):
        held = "nothing" if function is None else f"a value of type {type(function).__name__}"
        raise InputError(f"{what} {path!r}: not a function; {module_name!r} has {held} named {attribute!r}")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise InputError(
            f"{what} {path!r} cannot be called with {len(arguments)} positional arguments, "
            f"({', '.join(arguments)}): {error}"
        ) from None
    except ValueError:  # a C function without a signature
        pass
    return function
