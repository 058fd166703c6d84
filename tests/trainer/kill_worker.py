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

BEFORE = {
    "start": "trainer.loop:build",
    "rollout": "mcore.passes.decode:Decoder.feed",
    "asking": "trainer.sampling:RolloutQueue.take",
    "answering": "environments.text:TextEnvironment.answer",
    "grading": "trainer.sampling:response_text",
    "old pass": "trainer.batch:_score_old",
    "update": "mcore.model.policy:Policy.step",
    "sending": "rollout.client.engine:VLLMEngine.update_weights",
    "evaluation": "mcore.passes.decode:Decoder.feed",
    "validating": "trainer.loop:_evaluate",
    "files": "weights.chunks:ChunkWriter._append",
    "unnamed": "mcore.state.checkpoint:Saving._complete",
    "export": "weights.hf_writer:_Files.write",
    "exported": "weights.folder:_replace",
    "report": "lab.report.page:write_report",
    "cut": "record.log:read_rows",  # right after rows of a later step were cut off
    "loading": "weights.chunks:ChunkReader.read_into",
}
"""The point → the function in front of which it lies."""
AFTER = {
    "weights": "trainer.build:load_hf",
    "packing": "trainer.batch:make_mini_batches",
    "named": "mcore.state.checkpoint:Saving._complete",
    "row written": "record.log:RunLog.step",
}
HALF = {"row": "metrics.jsonl", "sequences": "sequences.jsonl", "samples": "samples.jsonl"}
"""The point → the file, half of whose row is written."""
TORN = {"config": "config", "state": "trainer"}
"""The point → the start of the name of a file that is open and still empty."""
ONLY_IN = {"rollout": "gen", "answering": "gen", "grading": "gen", "evaluation": "testing"}
"""The point → the phase of the log in which its function counts."""
WIDE = ("start", "rollout", "asking", "old pass", "update", "sending", "evaluation", "validating")
"""Points where nothing lingers: what follows takes long enough to be met somewhere in its middle."""


class Place:
    """Where this rank is, and what is to happen at the wanted point."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.point: str = plan.get("point", "")
        self.step = 0
        """The step under way."""
        self.phase = ""
        self._calls = 0

    def reached(self) -> None:
        """Say so if this is the wanted call of the wanted point, and linger."""
        plan = self.plan
        if self.step < plan["step"] or os.environ["RANK"] != str(plan["rank"]):
            return
        if self.phase != ONLY_IN.get(self.point, self.phase):
            return
        self._calls += 1
        if self._calls == plan["count"]:
            Path(plan["marker"]).touch()
            time.sleep(0 if self.point in WIDE else HOLD)

    # What follows stands in for functions of the package; the first argument is the function itself.

    def before(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.reached()
        return function(*args, **kwargs)

    def after(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        self.reached()
        return result

    def half_a_row(self, append: Any, log: Any, name: str, row: Any, **options: Any) -> None:
        """What a kill between two writes of one long row leaves."""
        path = log._folder / name
        begin = path.stat().st_size if path.exists() else 0
        append(log, name, row, **options)
        if name == HALF[self.point]:
            whole = path.read_bytes()
            os.truncate(path, (begin + len(whole)) // 2)
            self.reached()
            path.write_bytes(whole)

    def opened_first(self, write_text: Any, path: Path, *args: Any, **kwargs: Any) -> int:
        if path.name.startswith(TORN[self.point]):
            path.write_bytes(b"")
            self.reached()
        return int(write_text(path, *args, **kwargs))

    def file_by_file(self, rmtree: Any, path: Path, *args: Any, **kwargs: Any) -> None:
        first = Path(path) / "trainer.json"
        if Path(path).name.startswith("step_") and first.exists():
            first.unlink()
            self.reached()
        rmtree(path, *args, **kwargs)

    def counting(self, train_step: Any, run: Any) -> Any:
        self.step = run.state.step + 1
        return train_step(run)

    @contextmanager
    def noting(self, phase: Any, log: Any, name: str, *args: Any) -> Iterator[Any]:
        with phase(log, name, *args) as progress:
            self.phase = name
            try:
                yield progress
            finally:
                self.phase = ""


def writing_prompts(pack_and_score: Any, run: Any, responses: Any) -> Any:
    if os.environ["RANK"] == "0":
        row = {"step": run.state.step + 1, "prompts": [prompt.index for prompt in responses.prompts]}
        with Path(os.environ[PROMPTS]).open("a") as file:
            file.write(json.dumps(row) + "\n")
    return pack_and_score(run, responses)


def patches(place: Place) -> Iterator[Any]:
    """Of all that the place must know."""
    for table, stand_in in ((BEFORE, place.before), (AFTER, place.after)):
        if place.point in table:
            yield _replaced(table[place.point], stand_in)
    if place.point in HALF:
        yield _replaced("record.log:RunLog._append", place.half_a_row)
    if place.point in TORN:
        yield _wrapped(Path, "write_text", place.opened_first)
    if place.point == "removal":
        yield _wrapped(shutil, "rmtree", place.file_by_file)
    yield _replaced("trainer.loop:train_step", place.counting)
    yield _replaced("record.log:RunLog.phase", place.noting)
    yield _replaced("trainer.loop:pack_and_score", writing_prompts)


def _replaced(where: str, stand_in: Callable[..., Any]) -> Any:
    module, _, path = where.partition(":")
    owner: Any = importlib.import_module(f"megatron_fspo.{module}")
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return _wrapped(owner, name, stand_in)


def _wrapped(owner: Any, name: str, stand_in: Callable[..., Any]) -> Any:
    function = vars(owner)[name]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return stand_in(function, *args, **kwargs)

    return mock.patch.object(owner, name, wrapper)


def main() -> int:
    from megatron_fspo import cli
    from megatron_fspo.mcore import leave_uncompiled

    leave_uncompiled()  # as the command line does, before what is patched is imported
    place = Place(json.loads(os.environ.get(PLAN, "{}")))
    with ExitStack() as stack:
        for patch in patches(place):
            stack.enter_context(patch)
        return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
