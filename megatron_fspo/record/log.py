"""Where numbers go: a line per step for a person, ``metrics.jsonl`` always, wandb and others when asked."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from megatron_fspo.config import Config
from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.job.rank_status import Activity, ranges
from megatron_fspo.record.records import SequenceRecord
from megatron_fspo.record.tokens import TOKENS, Piece, drop_later, write_tokens
from megatron_fspo.record.trackers import Tracker, start_trackers

METRICS = "metrics.jsonl"
SEQUENCES = "sequences.jsonl"
ROUTERS = "routers.jsonl"
SAMPLES = "samples.jsonl"
JOBS = "jobs.jsonl"
WARNINGS = "warnings.jsonl"
PHASES = {
    "gen": "sampling, grading",
    "old_log_prob": "old pass",
    "ref": "reference pass",
    "update_actor": "update",
    "update_weights": "weights to the sampler",
}
"""The phases of a step: names in the metrics → words, in their order."""
_DOING = PHASES | {"gen": "sampling", "update_weights": "sync", "save_checkpoint": "saving"}
"""Names of phases → what a rank does then, for ``status``; others are their own."""
REMIND = 20
"""Steps between two lines about a state that lasts."""
_STEP = re.compile(rb'\{"step": (\d+)[,}]')
_BLOCK = 2**20


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
                ends = (end for end, row in _rows_from_end(self._folder / name) if row["step"] <= resume_step)
                sizes[name] = next(ends, 0)
        missing = _missing_steps(self._folder / METRICS, resume_step)
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
            "prompt": [r.sample // self._config.rollout.samples for r in kept],
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
            write_tokens(self._folder, step, self._config.rollout.samples, pieces)
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


def describe(step: int, steps: int, metrics: Mapping[str, float]) -> str:
    """Format one step as a line a person reads; without the numbers that the step does not have."""
    parts = [f"step {step:>4}/{steps}"]
    for label, name, form in (
        ("reward", "critic/rewards/mean", ".3f"),
        ("length", "response_length/mean", ".1f"),
        ("clipped", "actor/pg_clipfrac", ".1%"),
        ("LRE", "fspo/lre_mean", ".3f"),
        ("KL", "fspo/kl_k3", ".4f"),
        ("grad", "actor/grad_norm", ".2f"),
        ("dropped", "fspo/nonfinite", ".0f"),
        ("s", "timing_s/step", ".1f"),
    ):
        value = metrics.get(name)
        if value is not None and not math.isnan(value) and not (name == "fspo/nonfinite" and value == 0):
            parts.append(f"{label} {value:{form}}")
    for name, value in metrics.items():
        if is_accuracy(name):
            parts.append(f"{name.removeprefix('val/')} {value:.3f}")
    return "  ".join(parts)


def is_accuracy(name: str) -> bool:
    """Return True for the ``mean@k`` of an evaluation; not for an end of its interval."""
    return re.fullmatch(r"val/.+/mean@\d+", name) is not None


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a jsonl file of this module; a last line cut short by a crash is left out.

    Raises:
        InputError: another line is not a row; names file and line.
    """
    if not _is_there(path):
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield parse_row(line, path, f":{number}")


def rows_from_end(path: Path) -> Iterator[dict[str, Any]]:
    """Return the rows of such a file, last first; no more of the file is read than the caller asks for."""
    return (row for _, row in _rows_from_end(path))


def _rows_from_end(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the end of each row in the file, in bytes, and the row."""
    if not _is_there(path):
        return
    with path.open("rb") as file:
        begin, rest = file.seek(0, os.SEEK_END), b""
        while begin:
            size = min(begin, _BLOCK)
            begin -= size
            file.seek(begin)
            rest = file.read(size) + rest
            # Before the first line feed is the end of a line that begins in the block before.
            whole = rest.find(b"\n") + 1 if begin else 0
            end = begin + len(rest)
            for line in reversed(rest[whole:].splitlines(keepends=True)):
                if line.endswith(b"\n"):
                    yield end, parse_row(line, path, f", the line that ends at byte {end}")
                end -= len(line)
            rest = rest[:whole] if whole else rest if begin else b""


def _is_there(path: Path) -> bool:
    """Return True for a file; raise ``InputError`` for a pipe or device, of which nobody knows the end."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: not a regular file")
    return path.exists()


def parse_row(line: bytes, path: Path, place: str = "") -> dict[str, Any]:
    """Parse a line of such a file, at ``place``; ``InputError`` if it is not a row of a file of this name."""
    try:
        row: dict[str, Any] = json.loads(line)
        if type(row["step"]) is int and 0 <= row["step"] < 2**53 and _fits(row, path.name):
            return row
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise InputError(f"{path}{place}: not a row of this trainer: mend the line, or remove it")


def _fits(row: Mapping[str, Any], name: str) -> bool:
    """Return True if the values have the types that readers of the file ``name`` rely on."""
    if name == METRICS:
        return all(map(_is_number, row.values()))
    if name == SEQUENCES:
        columns = [value for key, value in row.items() if key != "step"]
        lengths = {len(column) for column in columns}
        return len(lengths) == 1 and "length" in row and all(map(_is_number, chain(*columns)))
    if name == SAMPLES:
        texts = [row["prompt"], row["response"], *chain(*row.get("parts", []))]
        numbers = row["reward"] is not None and _is_number(row["reward"])
        return numbers and "answer" in row and all(isinstance(text, str) for text in texts)
    if name == WARNINGS:
        return isinstance(row["title"], str) and isinstance(row["text"], str)
    if name == ROUTERS:
        return len({len(layer) for layer in row["load"]}) == 1 and all(map(_is_number, chain(*row["load"])))
    return isinstance(row["versions"], dict) and isinstance(row["device"], str)


def _is_number(value: object) -> bool:
    """Return True for null, a truth value, and a number that a float can hold."""
    return value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**1023)


def _missing_steps(path: Path, step: int | None) -> list[int]:
    """Return the steps up to ``step`` without a row."""
    if not step:
        return []
    there = set()
    if path.exists():
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                # Parsed, the rows of a long run would take many seconds.
                match = _STEP.match(line) if line.endswith(b"}\n") else None
                if match or line.endswith(b"\n"):
                    there.add(int(match[1]) if match else parse_row(line, path, f":{number}")["step"])
    return [number for number in range(1, step + 1) if number not in there]


def _unwritten(path: Path, error: OSError) -> TrainingError:
    return TrainingError(
        f"{path} cannot be written: {error.strerror}. The checkpoints of the run are whole: mend that, "
        "then continue with --resume"
    )
