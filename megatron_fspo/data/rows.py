"""The rows of a data file, JSON lines or parquet, one after the other: never the whole file at once.

A row keeps its location, and reads itself only when asked: so whoever wants to know all that is wrong with a
file can go on after a bad row. A file that cannot be read on at all ends the iteration.

JSON lines are UTF-8. A byte order mark at the start is skipped, and a carriage return before the line feed is
white space, as JSON has it. A key that an object has twice is an error: readers do not agree on which holds.
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


class Number(str):
    """A JSON number as the file spells it: ``1.50`` stays ``1.50``."""


@dataclass(frozen=True)
class Row:
    """One row of a file and where it stands. ``tree()`` is its object: JSON types, numbers from JSON lines as
    :class:`Number`, those from parquet as they are."""

    location: str
    """``train.jsonl:7``, lines as editors number them; or ``train.parquet: row 7``, also from 1."""
    _read: Callable[[], Any]

    def fail(self, what: str, cause: BaseException | None = None) -> NoReturn:
        """Raise ``InputError`` with the location in front."""
        raise InputError(f"{self.location}: {what}") from cause

    def tree(self) -> dict[str, Any]:
        """Return the row's object; ``InputError`` if it is no JSON object in UTF-8."""
        try:
            row = self._read()
            json.dumps(row, ensure_ascii=False).encode("utf-8")  # "\ud800" is JSON, but no tokenizer takes it
        except UnicodeError as error:
            self.fail(f"not UTF-8: {error}", error)
        except json.JSONDecodeError as error:
            legal = "" if error.doc[:1] == "{" else "; legal are JSON lines, an object each, and .parquet"
            self.fail(f"not JSON: {error.msg} at character {error.pos + 1}{legal}", error)
        except (ValueError, RecursionError) as error:
            self.fail(f"not JSON: {error}", error)
        if not isinstance(row, dict):
            self.fail(f"not an object but {kind(row)}")
        return row

    def fields(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Return ``tree`` with numbers as numbers; NaN and infinities, no words of JSON's, become None."""
        fields = {}
        for key, value in tree.items():
            try:
                fields[key] = _natural(value)
            except ValueError as error:  # Python's limit
                self.fail(f"{key!r} has an integer of more than 4,300 digits", error)
            except RecursionError as error:
                self.fail(f"{key!r} is nested too deep", error)
        return fields


def read_rows(path: Path, needed: Sequence[str] = ()) -> Iterator[Row]:
    """Yield the rows of a file whose suffix says the format: ``.parquet``, or else JSON lines, without blank
    lines. A column of parquet that cannot be read is left out, if it is none of the ``needed`` keys.

    Raises:
        InputError: the file cannot be read, or not read on; names it.
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
    for number, row in enumerate(read_parquet(path, needed), start=1):
        yield Row(f"{path}: row {number}", row.copy)


def _parse(raw: bytes) -> Any:
    return json.loads(
        raw.decode("utf-8"), parse_int=Number, parse_float=Number, object_pairs_hook=without_twins
    )


def without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys and values; ``ValueError`` if a key is there twice."""
    tree = dict(pairs)
    if len(tree) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:40]!r} is there twice")
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
    """Return what a JSON value is, in JSON's own words."""
    if value is None:
        return "null"
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN or an infinity"
    names = {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")
