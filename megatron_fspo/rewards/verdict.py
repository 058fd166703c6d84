"""A reward is a user's code: what it does wrong becomes a record that says for which response."""

from __future__ import annotations

import asyncio
import math
import reprlib
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import isawaitable
from typing import Any, SupportsFloat

from megatron_fspo.rewards.registry import AnyReward, Reward
from megatron_fspo.types import Completion, Prompt

LARGEST = 1e6
"""Of a reward, either way: sums and squares of as many as there are stay exact enough in fp32."""


class Interrupted(BaseException):
    """Raised within a call of a reward that took too long."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A response for which the reward gave no number that can be learned from."""

    prompt: Prompt
    completion: Completion
    response: str
    """The text that the reward was given."""
    problem: str
    """What the reward did, for one line: the exception with its place, or the value that it returned."""
    traceback: tuple[str, ...] = ()
    """Its lines; empty where the reward returned."""
    interrupted: bool = False
    """It took too long, and was ended."""

    def evidence(self) -> dict[str, Any]:
        """All of it as JSON types, with the names of ``samples.jsonl``."""
        return {
            "problem": self.problem,
            "traceback": list(self.traceback),
            "prompt_index": self.prompt.index,
            "prompt": self.prompt.text,
            "response": self.response,
            "answer": self.prompt.answer,
            "finish_reason": self.completion.finish_reason,
            "weight_version": self.completion.weight_version,
            "prompt_token_ids": list(self.prompt.token_ids),
            "token_ids": list(self.completion.token_ids),
        }


@dataclass(frozen=True)
class Request:
    """What a reward is given."""

    prompt: Prompt
    completion: Completion
    response: str

    def failure(self, problem: str, error: BaseException | None = None) -> Failure:
        """No verdict on this."""
        lines = "".join(traceback.format_exception(error)).splitlines() if error is not None else []
        return Failure(
            prompt=self.prompt,
            completion=self.completion,
            response=self.response,
            problem=problem,
            traceback=tuple(lines),
        )

    def raised(self, error: BaseException) -> Failure:
        """No verdict, as the reward raised."""
        return self.failure(f"raised {_described(error)}", error)

    def interrupted(self, error: Interrupted) -> Failure:
        """No verdict on this, as the reward took too long."""
        return replace(self.failure(f"was interrupted{_place(error)}", error), interrupted=True)

    def verdict(self, value: object) -> float | Failure:
        """The number that a reward returned (or a bool, or an array or tensor of one number)."""
        number = _as_number(value)
        if not abs(number) <= LARGEST:
            wanted = (
                f"a number from {-LARGEST:g} to {LARGEST:g}" if math.isfinite(number) else "a finite number"
            )
            return self.failure(f"returned {one_line(reprlib.repr(value))} instead of {wanted}")
        return number


def judge(reward: Reward, prompt: Prompt, completion: Completion, response: str) -> float | Failure:
    """The verdict of ``reward`` on one response; a :class:`Failure` where it raises, or returns anything but
    a finite number (or a bool, or an array or tensor of one number)."""
    request = Request(prompt, completion, response)
    value = called(reward, request)
    return value if isinstance(value, Failure) else request.verdict(value)


def called(reward: AnyReward, request: Request) -> object:
    """What the reward returns, be it what it may; a :class:`Failure` where it raises."""
    try:
        return reward(request.prompt, request.completion, request.response)
    except (Exception, SystemExit) as error:  # to exit is no verdict either
        return request.raised(error)


async def awaited(value: object, request: Request) -> object:
    """What an ``async`` reward returns in the end, of what :func:`called` gave."""
    if not isawaitable(value):
        return value
    try:
        return await value
    except (Exception, SystemExit) as error:
        return request.raised(error)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # not the reward's doing: we are closing
            raise
        return request.raised(error)


def one_line(text: str, limit: int = 300) -> str:
    """The text without line breaks, cut after ``limit`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]}…"


def _as_number(value: object) -> float:
    """NaN for what is none. Text is none: ``float`` would read it."""
    if isinstance(value, SupportsFloat):
        with suppress(Exception):
            return float(value)
    return math.nan


def _described(error: BaseException) -> str:
    """The exception's type, message and place, on one line."""
    return one_line(f"{type(error).__name__}: {error}").removesuffix(":") + _place(error)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is our call
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
