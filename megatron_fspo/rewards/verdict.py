"""A reward is a user's code: what it does wrong becomes a record that says for which response."""

from __future__ import annotations

import math
import reprlib
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, SupportsFloat

from megatron_fspo.rewards.registry import Reward
from megatron_fspo.types import Completion, Prompt


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A response for which the reward gave no finite number."""

    prompt: Prompt
    completion: Completion
    response: str
    """The text that the reward was given."""
    problem: str
    """What the reward did, for one line: the exception with its place, or the value that it returned."""
    traceback: tuple[str, ...] = ()
    """Its lines; empty where the reward returned."""

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


def judge(reward: Reward, prompt: Prompt, completion: Completion, response: str) -> float | Failure:
    """The verdict of ``reward`` on one response; a :class:`Failure` where it raises, or returns anything but
    a finite number (or a bool, or an array or tensor of one number)."""

    def failure(problem: str, lines: list[str]) -> Failure:
        return Failure(
            prompt=prompt,
            completion=completion,
            response=response,
            problem=problem,
            traceback=tuple(lines),
        )

    try:
        value: object = reward(prompt, completion, response)
    except (Exception, SystemExit) as error:  # to exit is no verdict either
        lines = "".join(traceback.format_exception(error)).splitlines()
        return failure(f"raised {_described(error)}", lines)
    number = _as_number(value)
    if not math.isfinite(number):
        return failure(f"returned {_one_line(reprlib.repr(value))} instead of a finite number", [])
    return number


def _as_number(value: object) -> float:
    """NaN for what is none. Text is none: ``float`` would read it."""
    if isinstance(value, SupportsFloat):
        with suppress(Exception):
            return float(value)
    return math.nan


def _described(error: BaseException) -> str:
    """The exception's type, message and place, on one line."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is our call
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return _one_line(f"{type(error).__name__}: {error}").removesuffix(":") + place


def _one_line(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]}…"
