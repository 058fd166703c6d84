"""Whether a run that was killed, or killed and resumed to its end, is the uninterrupted one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from runs import numbers, rows

FILES = ("metrics.jsonl", "sequences.jsonl", "samples.jsonl")
LIMIT = 2
"""``rollout.max_staleness`` of the runs that sample ahead."""


def newest(run: Path) -> int | None:
    """The step of the newest checkpoint under its name."""
    names = [path.name.removeprefix("step_") for path in (run / "checkpoints").glob("step_*")]
    return max((int(name) for name in names if name.isdigit()), default=None)


def after_kill(run: Path, whole: Path, *, exact: bool = True) -> list[str]:
    """What is wrong with the files a kill left: all that a checkpoint implies must be there.

    Args:
        exact: every number must be that of the uninterrupted run.
    """
    done = newest(run)
    if done is None:
        return []
    found = []
    for file in FILES:
        got = [row for row in rows(run.parent, run.name, file) if row["step"] <= done]
        want = [row for row in rows(whole.parent, whole.name, file) if row["step"] <= done]
        found += _rows_differ(file, got, want, exact=exact)
    want_folder = whole / f"checkpoints/step_{done:06d}"
    if exact and want_folder.exists():
        found += _files_differ(run / f"checkpoints/step_{done:06d}", want_folder)
    return found


def at_end(run: Path, whole: Path, *, keep: int, exact: bool = True) -> list[str]:
    """What is wrong with a run that was killed, resumed, and went to its end."""
    found = []
    for file in FILES:
        got, want = rows(run.parent, run.name, file), rows(whole.parent, whole.name, file)
        found += _rows_differ(file, got, want, exact=exact)
    if exact:
        found += _files_differ(run / "hf", whole / "hf")
        if (whole / "adapter").exists():
            found += _files_differ(run / "adapter", whole / "adapter")
    # A rank that was slow is warned of: that is the machine's doing.
    names, wanted = ({path.name for path in folder.iterdir()} - {"warnings.jsonl"} for folder in (run, whole))
    if names != wanted:
        found.append(f"beside each other are {sorted(names ^ wanted)}")
    left, kept = (sorted(path.name for path in (one / "checkpoints").iterdir()) for one in (run, whole))
    if left != kept[-keep:]:
        found.append(f"checkpoints: {left}")
    return found


def prompts_differ(run: Path, whole: Path) -> list[str]:
    """Every step, each time it was tried, has the prompts that the uninterrupted run gave it."""
    want = {row["step"]: row["prompts"] for row in _read(whole)}
    found = _read(run)
    problems = []
    if wrong := sorted({row["step"] for row in found if row["prompts"] != want[row["step"]]}):
        problems.append(f"other prompts in steps {wrong}")
    if missing := sorted(want.keys() - {row["step"] for row in found}):
        problems.append(f"no prompts in steps {missing}")
    return problems


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _rows_differ(
    file: str, got: list[dict[str, Any]], want: list[dict[str, Any]], *, exact: bool
) -> list[str]:
    steps, wanted = [row["step"] for row in got], [row["step"] for row in want]
    if file == "metrics.jsonl" or exact:
        if steps != wanted:
            return [f"{file} has steps {steps}, not {wanted}"]
    elif not set(steps) <= set(wanted) or steps != sorted(steps):
        return [f"{file} has steps {steps}"]
    if exact:
        wrong = [row["step"] for row, other in zip(got, want, strict=True) if numbers(row) != numbers(other)]
        return [f"{file}: other numbers in steps {wrong}"] if wrong else []
    if file != "metrics.jsonl":
        return []
    keys = [row["step"] for row, other in zip(got, want, strict=True) if _keys(row) != _keys(other)]
    stale = [row["step"] for row in got if row.get("rollout/staleness/max", 0) > LIMIT]
    return ([f"other metrics in steps {keys}"] if keys else []) + (
        [f"older than allowed in steps {stale}"] if stale else []
    )


def _keys(row: dict[str, Any]) -> set[str]:
    """What is logged in any case; of clip rates there are as many as there are sorts of lengths."""
    return {key for key in numbers(row) if not key.startswith("fspo/clip_rate/")}


def _files_differ(got: Path, want: Path) -> list[str]:
    one, two = _hashes(got), _hashes(want)
    wrong = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
    return [f"{got.name}: {', '.join(wrong)}"] if wrong else []


def _hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }
