"""The rows of a data file, JSON lines or parquet, read one by one.

A row has its location and is parsed on request, so a check of a file can continue after an invalid row. If
the file itself cannot be read further, the iteration ends.

JSON lines are UTF-8. A byte order mark at the start is skipped, and a carriage return before the line feed
counts as white space, as in JSON. A duplicate key is an error: parsers disagree on which one counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from megatron_fspo.data.parquet import read_parquet
from megatron_fspo.errors import InputError

_BOM = b"\xef\xbb\xbf"
MEDIA = ("image", "images", "video", "videos", "audio", "audios")  # which a text model cannot read


class Number(str):
    """A JSON number with the spelling of the file: ``1.50`` stays ``1.50``."""


@dataclass(frozen=True)
class Row:
    """One row of a file. ``tree()`` has JSON types, with numbers from JSON lines as :class:`Number`."""

    location: str
    """``train.jsonl:7``, with lines counted from 1, or ``train.parquet: row 7``, also from 1."""
    _read: Callable[[], Any]

    def fail(self, what: str, cause: BaseException | None = None) -> NoReturn:
        """Raise ``InputError`` with the location in front."""
        raise InputError(f"{self.location}: {what}") from cause

    def tree(self) -> dict[str, Any]:
        """Return the row's object. Raises ``InputError`` if the row is not a JSON object in UTF-8."""
        try:
            row = self._read()
            json.dumps(row, ensure_ascii=False).encode("utf-8")  # "\ud800" is JSON, but tokenizers reject it
        except UnicodeError as error:
            self.fail(f"not UTF-8: {error}", error)
        except json.JSONDecodeError as error:
            legal = "" if error.doc[:1] == "{" else "; use JSON lines with one object each, or .parquet"
            self.fail(f"not JSON: {error.msg} at character {error.pos + 1}{legal}", error)
        except (ValueError, RecursionError) as error:
            self.fail(f"not JSON: {error}", error)
        if not isinstance(row, dict):
            self.fail(f"must be an object, got {kind(row)}")
        return row

    def fields(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Return ``tree`` with plain numbers. NaN and infinities, which JSON does not have, become None."""
        fields = {}
        for key, value in tree.items():
            try:
                fields[key] = _natural(value)
            except ValueError as error:  # Python's limit on digits
                self.fail(f"{key!r} has an integer of more than 4,300 digits", error)
            except RecursionError as error:
                self.fail(f"{key!r} is nested too deeply", error)
        return fields


def read_rows(path: Path, needed: Sequence[str] = ()) -> Iterator[Row]:
    """Yield the rows of a file: parquet if its suffix is ``.parquet``, else JSON lines, skipping blank lines.
    Unreadable parquet columns are left out, except media and ``needed`` keys, which are errors.

    Raises:
        InputError: the file cannot be read, or not to its end.
    """
    try:
        with path.open("rb") as file:
            if path.suffix.lower() != ".parquet":
                for number, raw in enumerate(file, start=1):
                    line = raw.removeprefix(_BOM) if number == 1 else raw
                    if line.strip():
                        yield Row(f"{path}:{number}", partial(_parse, line))
                return
    except OSError as error:
        raise InputError(f"{path}: cannot read the prompts: {error.strerror}") from error
    for number, row in enumerate(read_parquet(path, (*MEDIA, *needed)), start=1):
        yield Row(f"{path}: row {number}", row.copy)


def _parse(raw: bytes) -> Any:
    return json.loads(
        raw.decode("utf-8"), parse_int=Number, parse_float=Number, object_pairs_hook=without_twins
    )


def without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object with these keys and values; ``ValueError`` for a duplicate key."""
    tree = dict(pairs)
    if len(tree) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:40]!r} occurs twice")
    return tree


def _natural(value: Any) -> Any:
    if isinstance(value, Number):
        number = float(value) if set(value) & set(".eE") else int(value)
        return _natural(number)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_natural(item) for item in value]
    if isinstance(value, dict):
        return {key: _natural(item) for key, item in value.items()}
    return value


def kind(value: Any) -> str:
    """Return the JSON type of a value, for messages."""
    if value is None:
        return "null"
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN or an infinity"
    names = {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")
