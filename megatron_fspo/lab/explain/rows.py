"""The rows of a dump, JSON lines or parquet, each with the number by which errors name it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_fspo.data.parquet import read_parquet
from megatron_fspo.errors import InputError

try:
    import msgspec
except ImportError:  # in the environment of a peer, where this package is installed without its dependencies
    msgspec = None  # type: ignore[assignment]


def is_parquet(path: Path) -> bool:
    """By its suffix."""
    return path.suffix.lower() == ".parquet"


def place(path: Path, number: int) -> str:
    """Of a row, in the words of an error: ``dump.jsonl:7`` or ``dump.parquet: row 7``, from 1."""
    return f"{path}: row {number}" if is_parquet(path) else f"{path}:{number}"


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number, from 1, and fields of every row; blank lines of JSON lines are left out.

    Raises:
        InputError: the file cannot be read, or a line is not an object in JSON; names file and line.
    """
    try:
        with path.open("rb") as file:
            if not is_parquet(path):
                yield from (
                    (n, _parse(line, place(path, n))) for n, line in enumerate(file, 1) if line.strip()
                )
                return
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        yield from enumerate(read_parquet(path), 1)
    except ImportError as error:
        raise InputError(
            f"{path}: parquet needs pyarrow, which is not installed: pip install pyarrow"
        ) from error


def _parse(line: bytes, where: str) -> dict[str, Any]:
    row = _quickly(line)
    if row is not None:
        return row
    try:
        row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_without_twins)
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not text in UTF-8 at byte {error.start + 1}") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON: {error.msg} at character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise InputError(f'{where}: not an object: a row is {{"length": 12, "log_ratio_sum": 0.1, …}}')
    return row


def _quickly(line: bytes) -> dict[str, Any] | None:
    """The row, in a third of the time; None where only the standard parser can say what it is.

    That is all that is no plain JSON (NaN, a broken line), and lines with more colons than keys: text has
    colons, but so has a line with a key twice, of which msgspec keeps one.
    """
    if msgspec is None:
        return None
    try:
        row = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and line.count(b":") == len(row) else None


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:40]!r} is there twice")
    return found
