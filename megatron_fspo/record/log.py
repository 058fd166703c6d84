"""Where numbers go: a line per step for a person, ``metrics.jsonl`` always, wandb and others when asked."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from megatron_fspo.config import Config
from megatron_fspo.errors import TrainingError
from megatron_fspo.job.rank_status import Activity, ranges
from megatron_fspo.record.records import SequenceRecord
from megatron_fspo.record.rows import (
    JOBS,
    METRICS,
    PHASES,
    ROUTERS,
    SAMPLES,
    SEQUENCES,
    WARNINGS,
    describe,
    missing_steps,
    read_rows,
    rows_from_end,
    rows_with_ends,
)  # fmt: skip
from megatron_fspo.record.tokens import TOKENS, Piece, drop_later, write_tokens
from megatron_fspo.record.trackers import Tracker, start_trackers

_DOING = PHASES | {"gen": "sampling", "update_weights": "sync", "save_checkpoint": "saving"}
"""Names of phases → what a rank does then, for ``status``; others are their own."""
REMIND = 20
"""Steps between two lines about a state that lasts."""


class RunLog:
    """The log of one run. On ranks other than 0 every method does nothing, and finds nothing.

    Args:
        config: of the run.
        writer: whether this is rank 0.
        resume_step: keep what is logged up to this step and drop the rest; None starts afresh.

    Raises:
        InputError: a row of an earlier step is corrupt, or a tracker does not take the run. No file changed.
        TrainingError: also of the other methods; a file cannot be written (a full disk, say).
    """

    def __init__(self, config: Config, *, writer: bool, resume_step: int | None) -> None:
        self._writer = writer
        self._config = config
        self._folder = config.run_folder
        self._trackers: list[Tracker] = []
        self._speeds: list[dict[str, float]] = []
        self._reminded: dict[str, int] = {}
        self._warned: set[str] = set()
        self._began = resume_step or 0
        self.timings: dict[str, float] = {}
        """Seconds of each phase since this was last cleared."""
        self.activity = Activity()
        """The activity of this rank; each has its own."""
        if not writer:
            return
        more = [name for name in (JOBS, WARNINGS, ROUTERS) if (self._folder / name).exists()]
        names = (METRICS, SEQUENCES, SAMPLES, *more)
        sizes = dict.fromkeys(names, 0)
        if resume_step is not None:  # the rows after this step are the last ones
            for name in names:
                ends = (end for end, row in rows_with_ends(self._folder / name) if row["step"] <= resume_step)
                sizes[name] = next(ends, 0)
        missing = missing_steps(self._folder / METRICS, resume_step)
        self._trackers = start_trackers(config, resume_step=resume_step)
        drop_later(self._folder, resume_step or 0)
        for name, size in sizes.items():
            try:
                with (self._folder / name).open("ab") as file:
                    file.truncate(size)
            except OSError as error:
                raise _unwritten(self._folder / name, error) from None
        self._warned = {row["title"] for row in read_rows(self._folder / WARNINGS)}
        if missing:
            text = f"{self._folder / METRICS} has no row of {len(missing)} steps: {ranges(missing)}"
            self.warn("missing rows", f"{text}. They are missing from the report; training is not affected")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give the metrics of one step to the file and the trackers, and as one line to the console."""
        if not self._writer:
            return
        self._speeds.append({k: v for k, v in metrics.items() if k.startswith(("timing_s/", "perf/"))})
        # JSON has no NaN and no infinity.
        row = {"step": step, **{k: v if math.isfinite(v) else None for k, v in metrics.items()}}
        # On the disk before the checkpoint of the step has its name.
        self._append(METRICS, row, sync=True)
        for tracker in self._trackers:
            tracker.step(step, metrics)
        self.say(describe(step, self._config.run.steps, metrics))

    def job(self, step: int, machine: Mapping[str, Any]) -> None:
        """Note a job that goes on after this step, and what it computes on."""
        self._append(JOBS, {"step": step, **machine})

    def zero_variance_steps(self) -> int:
        """Count the last steps in a row whose groups all had zero variance."""
        rows = rows_from_end(self._folder / METRICS) if self._writer else iter(())
        return sum(1 for _ in takewhile(lambda row: row.get("critic/zero_variance_groups") == 1, rows))

    def sequences(
        self, step: int, records: Sequence[SequenceRecord], turns: Sequence[int] | None = None
    ) -> None:
        """Keep an even sample of the off-policy records that are in a rate, for the report's pictures, with
        the turns of each sample of the rollout, where there may be several."""
        limit = self._config.log.sequences
        counted = [r for r in records if r.counts]
        if not counted or not limit:
            return
        kept = counted[:: math.ceil(len(counted) / limit)]
        row: dict[str, Any] = {
            "step": step,
            "prompt": [r.sample // self._config.samples for r in kept],
            "update": [r.update for r in kept],
            "length": [r.length for r in kept],
            "log_ratio_sum": [r.log_ratio_sum for r in kept],
            "advantage": [r.advantage for r in kept],
            "clipped": [r.clipped > 0 for r in kept],
            "out_of_band": [r.out_of_band for r in kept],
            "ratio": [r.ratio for r in kept],
        }
        if turns is not None:
            row["turns"] = [turns[r.sample] for r in kept]
        if any(r.flipped for r in kept):
            row["flipped"] = [r.flipped for r in kept]
            row["flipped_log_ratio_sum"] = [r.flipped_log_ratio_sum for r in kept]
        self._append(SEQUENCES, row)

    def tokens(self, step: int, pieces: Sequence[Piece]) -> None:
        """Keep token log-probs of a step."""
        if not self._writer:
            return
        try:
            write_tokens(self._folder, step, self._config.samples, pieces)
        except OSError as error:
            raise _unwritten(self._folder / TOKENS, error) from None

    def routers(self, step: int, load: Tensor) -> None:
        """Keep the tokens of each expert [layers, E] in the optimizer steps of a step."""
        self._append(ROUTERS, {"step": step, "load": load.long().tolist()})

    def responses(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep responses of an evaluation."""
        for row in rows:
            self._append(SAMPLES, {"step": step, **row})

    def pictures(self, step: int, draw: Callable[[Path], Mapping[str, str]] | None) -> None:
        """Give the trackers what ``draw`` makes of the folder of the run; before the metrics of the step."""
        if self._trackers and draw is not None:
            svgs = draw(self._folder)
            for tracker in self._trackers:
                tracker.pictures(step, svgs)

    def say(self, text: str) -> None:
        """Print a line on the console, above any progress bar."""
        if self._writer:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def warn(self, title: str, text: str) -> None:
        """Print a line, which is also an alert of the trackers and a line of the report."""
        self.say(text)
        self._warned.add(title)
        step = max(self.activity.step, self._began)
        self._append(WARNINGS, {"step": step, "title": title, "text": text})
        for tracker in self._trackers:
            tracker.alert(title, text)

    def warn_once(self, title: str, text: str) -> None:
        """Warn, unless the run has warned under this title before."""
        if title not in self._warned:
            self.warn(title, text)

    def remind(self, topic: str, step: int, text: str) -> None:
        """Warn, but not again about this topic for :data:`REMIND` steps."""
        if step >= self._reminded.get(topic, -REMIND) + REMIND:
            self._reminded[topic] = step
            self.warn(topic, f"step {step}: {text}")

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Tell the trackers why, where the run inside ends itself."""
        try:
            yield
        except TrainingError as error:
            for tracker in self._trackers:
                tracker.alert("the run ended itself", str(error))
                tracker.close(failed=True)
            raise

    @contextmanager
    def phase(self, name: str, total: int = 1, unit: str = "") -> Iterator[Callable[[int], None]]:
        """A progress bar on a terminal, and the seconds of the phase as ``timing_s/<name>``."""

        def progress(count: int) -> None:
            self.activity.progress = time.time()
            bar.update(count)

        began = time.perf_counter()
        # disable=None: no bar where standard error is not a terminal.
        disable = None if self._writer else True
        bar = tqdm(total=total, desc=f"{name:>14}", unit=unit, leave=False, disable=disable)
        before, self.activity.phase = self.activity.phase, _DOING.get(name, name)
        self.activity.progress = time.time()
        with bar:
            try:
                yield progress
            finally:
                self.activity.phase, self.activity.progress = before, time.time()
        seconds = time.perf_counter() - began
        self.timings[f"timing_s/{name}"] = self.timings.get(f"timing_s/{name}", 0.0) + seconds

    def close(self, table: Callable[[Sequence[Mapping[str, float]]], str] | None = None) -> None:
        """Print what ``table`` makes of the times of this job's steps, and end the trackers."""
        if table is not None and self._speeds:
            self.say(f"\n{table(self._speeds)}")
        for tracker in self._trackers:
            tracker.close()

    def _append(self, name: str, row: Mapping[str, Any], *, sync: bool = False) -> None:
        if not self._writer:
            return
        try:
            with (self._folder / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            raise _unwritten(self._folder / name, error) from None


def _unwritten(path: Path, error: OSError) -> TrainingError:
    return TrainingError(
        f"{path} cannot be written: {error.strerror}. The checkpoints of the run are whole: mend that, "
        "then continue with --resume"
    )
