"""The jsonl files of a run: their names, how they are read, and a step as a line of text."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_fspo.errors import InputError

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
_BLOCK = 2**20
_STEP = re.compile(rb'\{"step": (\d+)[,}]')


def describe(step: int, steps: int, metrics: Mapping[str, float]) -> str:
    """Format one step as a line a person reads; without the numbers that the step does not have."""
    parts = [f"step {step:>4}/{steps}"]
    for label, name, form in (
        ("reward", "critic/rewards/mean", ".3f"),
        *([] if "critic/rewards/mean" in metrics else [("loss", "actor/pg_loss", ".4f")]),
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
        if is_evaluation(name):
            parts.append(f"{name.removeprefix('val/')} {value:.3f}")
    return "  ".join(parts)


def is_evaluation(name: str) -> bool:
    """Return True for the ``mean@k`` or the loss of an evaluation; not for an end of its interval."""
    return re.fullmatch(r"val/.+/(mean@\d+|loss)", name) is not None


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
    return (row for _, row in rows_with_ends(path))


def rows_with_ends(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
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


def missing_steps(path: Path, step: int | None) -> list[int]:
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
