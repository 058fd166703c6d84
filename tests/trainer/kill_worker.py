"""One rank of a training run that says when it is at a wanted point of the code, and lingers there.

Run by ``kill_runs.py``, which then kills it; ``PLAN`` in the environment is the point as JSON. Without it the
run is an ordinary one. Either way the first rank writes down which prompts every step was given.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

PLAN, PROMPTS = "KILL_PLAN", "KILL_PROMPTS"
HOLD = 1.5
"""Seconds for which a rank stays at a held point."""
_M = "megatron_fspo."

BEFORE = {
    "start": "trainer.loop:build",
    "rollout": "mcore.decode:Decoder.feed",
    "asking": "trainer.begin:roll_out",
    "grading": "trainer.sampling:response_text",
    "old pass": "trainer.begin:score_old",
    "update": "mcore.policy:Policy.step",
    "sending": "rollout.client.engine:VLLMEngine.update_weights",
    "evaluation": "mcore.decode:Decoder.feed",
    "validating": "trainer.loop:_evaluate",
    "files": "weights.chunks:ChunkWriter._append",
    "unnamed": "mcore.checkpoint:Saving._complete",
    "export": "weights.hf_writer:_Files.write",
    "exported": "weights.folder:_replace",
    "report": "lab.report.page:write_report",
    "cut": "record.log:read_rows",  # right after rows of a later step were cut off
    "loading": "weights.chunks:ChunkReader.read_into",
}
"""The point → the function in front of which it lies."""
AFTER = {
    "weights": "trainer.build:load_hf",
    "packing": "trainer.begin:make_mini_batches",
    "named": "mcore.checkpoint:Saving._complete",
    "row written": "record.log:RunLog.step",
}
HALF = {"row": "metrics.jsonl", "sequences": "sequences.jsonl", "samples": "samples.jsonl"}
"""The point → the file, half of whose row is written."""
TORN = {"config": "config", "state": "trainer"}
"""The point → the start of the name of a file that is open and still empty."""
ONLY_IN = {"rollout": "gen", "grading": "gen", "evaluation": "testing"}
"""The point → the phase of the log in which its function counts."""
WIDE = ("start", "rollout", "asking", "old pass", "update", "sending", "evaluation", "validating")
"""Points where nothing lingers: what follows takes long enough to be met somewhere in its middle."""


class Place:
    """Where this rank is, and what is to happen at the wanted point."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.step = 0
        """The step under way."""
        self.phase = ""
        self._calls = 0

    def reached(self, point: str) -> None:
        """Say so if this is the wanted call of the wanted point, and linger."""
        plan = self.plan
        if point != plan.get("point") or self.step < plan["step"] or os.environ["RANK"] != str(plan["rank"]):
            return
        if self.phase != ONLY_IN.get(point, self.phase):
            return
        self._calls += 1
        if self._calls == plan["count"]:
            Path(plan["marker"]).touch()
            time.sleep(0 if point in WIDE else HOLD)


def patches(place: Place) -> Iterator[Any]:
    """Of all that the place must know."""
    point = place.plan.get("point", "")
    for table, before in ((BEFORE, True), (AFTER, False)):
        if point in table:
            yield _around(table[point], point, place, before=before)
    if point in HALF:
        yield _replaced("record.log:RunLog._append", lambda append: _half_a_row(append, point, place))
    if point in TORN:
        yield mock.patch.object(Path, "write_text", _opened_first(Path.write_text, point, place))
    if point == "removal":
        yield mock.patch.object(shutil, "rmtree", _file_by_file(shutil.rmtree, place))
    yield _replaced("trainer.loop:train_step", lambda step: _counting(step, place))
    yield _replaced("record.log:RunLog.phase", lambda phase: _noting(phase, place))
    yield _replaced("trainer.begin:roll_out", _writing_prompts)


def _replaced(where: str, wrap: Callable[[Any], Any]) -> Any:
    module, _, path = where.partition(":")
    owner: Any = importlib.import_module(_M + module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return mock.patch.object(owner, name, wrap(vars(owner)[name]))


def _around(where: str, point: str, place: Place, *, before: bool) -> Any:
    def wrap(function: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if before:
                place.reached(point)
            result = function(*args, **kwargs)
            if not before:
                place.reached(point)
            return result

        return wrapper

    return _replaced(where, wrap)


def _half_a_row(append: Any, point: str, place: Place) -> Any:
    def wrapper(log: Any, name: str, row: Any, **options: Any) -> None:
        if name != HALF[point]:
            append(log, name, row, **options)
            return
        # What a kill between two writes of one long row leaves.
        path = log._folder / name
        begin = path.stat().st_size if path.exists() else 0
        append(log, name, row, **options)
        whole = path.read_bytes()
        os.truncate(path, (begin + len(whole)) // 2)
        place.reached(point)
        path.write_bytes(whole)

    return wrapper


def _opened_first(write_text: Any, point: str, place: Place) -> Any:
    def wrapper(path: Path, *args: Any, **kwargs: Any) -> int:
        if path.name.startswith(TORN[point]):
            path.write_bytes(b"")
            place.reached(point)
        return int(write_text(path, *args, **kwargs))

    return wrapper


def _file_by_file(rmtree: Any, place: Place) -> Any:
    def wrapper(path: Path, *args: Any, **kwargs: Any) -> None:
        if Path(path).name.startswith("step_") and (Path(path) / "trainer.json").exists():
            (Path(path) / "trainer.json").unlink()
            place.reached("removal")
        rmtree(path, *args, **kwargs)

    return wrapper


def _counting(train_step: Any, place: Place) -> Any:
    def wrapper(run: Any) -> Any:
        place.step = run.step + 1
        return train_step(run)

    return wrapper


def _noting(phase: Any, place: Place) -> Any:
    @contextmanager
    def wrapper(log: Any, name: str, *args: Any) -> Iterator[Any]:
        with phase(log, name, *args) as progress:
            place.phase = name
            try:
                yield progress
            finally:
                place.phase = ""

    return wrapper


def _writing_prompts(rollout: Any) -> Any:
    def wrapper(run: Any) -> Any:
        found, metrics = rollout(run)
        if os.environ["RANK"] == "0":
            row = {"step": run.step + 1, "prompts": [prompt.index for prompt in found.prompts]}
            with Path(os.environ[PROMPTS]).open("a") as file:
                file.write(json.dumps(row) + "\n")
        return found, metrics

    return wrapper


def main() -> int:
    from megatron_fspo import cli

    place = Place(json.loads(os.environ.get(PLAN, "{}")))
    with ExitStack() as stack:
        for patch in patches(place):
            stack.enter_context(patch)
        return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
