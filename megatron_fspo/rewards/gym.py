"""``reasoning_gym``: tasks of the package of that name, graded by its own scorers.

Scorers run in worker processes with limits, like ``math``, as some hang on model output. Nine of them pass it
to Python's ``eval`` or to sympy's ``parse_expr``, which evaluates too; :mod:`.gym_worker` replaces these.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from megatron_fspo.errors import InputError
from megatron_fspo.rewards.extract import extract
from megatron_fspo.rewards.grade import Failure, Grade, GradeOrFailure, GradeRequest
from megatron_fspo.rewards.pool import InWorkers

LONGEST = 100_000
"""Maximum characters of an answer; longer ones score 0."""
_LEFT_OUT = {
    "composite": "it combines other tasks: write the rows of each",
    "game_of_life_halting": "its scorer (reasoning-gym 0.1.25) accepts any text",
}
_FIELDS = ("task", "config", "metadata")


class ReasoningGym(InWorkers):
    """The reward ``reasoning_gym``: a scorer's number, mostly from 0 to 1."""

    function = "megatron_fspo.rewards.gym_worker:score"

    def grade(self, request: GradeRequest) -> GradeOrFailure | Future[GradeOrFailure]:
        fields = request.prompt.fields
        if missing := [name for name in _FIELDS if name not in fields]:
            return request.failure(
                f"needs a field {missing[0]!r} in the prompt's row: make rows with gym_rows"
            )
        answer = extract(request.final, self._extract)
        if answer is None or len(answer) > LONGEST:
            return Grade(score=0.0, parsed=False)
        row = json.dumps({name: fields[name] for name in _FIELDS} | {"answer": request.prompt.answer})

        def grade(value: tuple[float, bool]) -> GradeOrFailure:
            score = request.number(value[0])
            if isinstance(score, Failure):
                return score
            return Grade(score=score, answer=answer, parsed=value[1])

        unfinished = Grade(score=0.0, answer=answer, timed_out=True)
        return self.ask(request, row, answer, unfinished=unfinished, then=grade)


def gym_rows(task: str, size: int, seed: int, **config: Any) -> Iterator[dict[str, Any]]:
    """Generate the rows of a data file for ``reward.name = "reasoning_gym"``.

    Example::

        with open("gym.jsonl", "w") as file:
            for row in gym_rows("countdown", size=1000, seed=1, max_numbers=4):
                print(json.dumps(row), file=file)

    Args:
        task: name of a dataset of reasoning_gym.
        size: number of rows.
        seed: seed of the dataset.
        config: settings of the dataset.

    Yields:
        ``prompt``, ``answer`` (empty if the task has no single one), ``task``, ``config`` and ``metadata``.
        The last two are JSON text, since their structure differs between rows.

    Raises:
        InputError: the task or a setting is unknown, or the task cannot be scored.
    """
    import reasoning_gym

    if task in _LEFT_OUT:
        raise InputError(f"reasoning_gym task {task!r} is not supported: {_LEFT_OUT[task]}")
    try:
        dataset = reasoning_gym.create_dataset(task, size=size, seed=seed, **config)
        settings = json.dumps(_plain(config))
    except (ValueError, TypeError, AssertionError) as error:
        raise InputError(f"reasoning_gym task {task!r} with {config}: {error}") from error
    return (
        {
            "prompt": entry["question"],
            "answer": "" if entry["answer"] is None else str(entry["answer"]),
            "task": task,
            "config": settings,
            "metadata": json.dumps(_plain(entry["metadata"])),
        }
        for entry in map(dataset.__getitem__, range(size))
    )


def _plain(value: Any) -> Any:
    """Encode as JSON types, keeping tuples and sets, which scorers compare; ``gym_worker.rich`` decodes."""
    if hasattr(value, "item"):  # a numpy scalar
        value = value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, tuple):
        return {"__tuple__": [_plain(item) for item in value]}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _plain(item) for key, item in value.items()}
        return {"__dict__": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if isinstance(value, set | frozenset):
        return {"__set__": sorted(map(_plain, value), key=repr)}
    raise TypeError(f"a {type(value).__name__} has no JSON form")
