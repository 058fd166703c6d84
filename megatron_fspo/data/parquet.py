"""Read parquet files as rows of JSON types."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_fspo.errors import InputError

if TYPE_CHECKING:
    import pyarrow

_BATCH_ROWS = 1024
_TOOL_KEYS = ("arguments", "parameters", "tools", "chat_template_kwargs")
"""Objects whose keys differ between rows: Arrow gives every row the keys of all, as null."""


def read_parquet(path: Path, needed: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the rows as JSON types.

    Columns without a JSON equivalent (binary, decimal, dates, …) are left out, unless they are ``needed``:
    keys of a row, in which dots lead into objects.

    Raises:
        InputError: the file is not parquet, truncated or damaged, or a needed column has no JSON equivalent.
    """
    import pyarrow  # takes 0.3 s
    from pyarrow import parquet

    rows = 0
    try:
        with pyarrow.OSFile(str(path), "rb") as raw, parquet.ParquetFile(raw) as file:
            names = _columns(path, file.schema_arrow, needed)
            for batch in file.iter_batches(_BATCH_ROWS, columns=names, use_threads=False):
                yield from _values(path, batch, rows)
                rows += batch.num_rows
    except InputError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        after = f" after row {rows}" if rows else ""
        raise InputError(f"{path}: not parquet, cut short or damaged{after}: {reason}") from error


def unread_columns(path: Path) -> dict[str, str]:
    """Return name and type of the columns that :func:`read_parquet` leaves out; none of other files."""
    if path.suffix.lower() != ".parquet":
        return {}
    from pyarrow import parquet

    return {field.name: str(field.type) for field in parquet.read_schema(path) if not _is_json(field.type)}


def _without_nulls(value: Any, inside: bool = False) -> Any:
    """Return a value without the nulls in objects of ``_TOOL_KEYS``."""
    if isinstance(value, list):
        return [_without_nulls(item, inside) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_nulls(item, inside or key in _TOOL_KEYS)
        for key, item in value.items()
        if not (inside and item is None)
    }


def _values(path: Path, batch: pyarrow.RecordBatch, before: int) -> list[dict[str, Any]]:
    """Return the rows of a batch; ``before`` is the number of rows before it in the file."""
    wrong = (UnicodeError, KeyError, RecursionError)  # KeyError: a map has a key twice
    try:
        if not batch.num_columns:
            return [{} for _ in range(batch.num_rows)]
        columns = [
            _column(name, column) for name, column in zip(batch.schema.names, batch.columns, strict=True)
        ]
        return [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]
    except wrong:
        for number, name in ((n, name) for n in range(batch.num_rows) for name in batch.schema.names):
            try:
                batch.column(name)[number].as_py(maps_as_pydicts="strict")
            except wrong as error:
                where = f"{path}: row {before + number + 1}: {name!r}"
                raise InputError(f"{where} cannot be read: {error}") from error
        raise


def _column(name: str, column: pyarrow.Array) -> list[Any]:
    """Return the values of a column, one per row."""
    from pyarrow import types

    kind = column.type
    if (types.is_list(kind) or types.is_large_list(kind)) and types.is_floating(kind.value_type):
        items = column.flatten()
        if not column.null_count and not items.null_count:
            # Convert all at once: one Arrow object per token log-prob takes ten times as long.
            numbers, ends = items.to_numpy().tolist(), column.value_lengths().to_numpy().cumsum().tolist()
            return [numbers[i:j] for i, j in zip([0, *ends], ends, strict=False)]
    values = column.to_pylist(maps_as_pydicts="strict")
    return (
        [_without_nulls(value, name in _TOOL_KEYS) for value in values] if types.is_nested(kind) else values
    )


def _columns(path: Path, schema: pyarrow.Schema, needed: Sequence[str]) -> list[str] | None:
    """Return the names of the columns to read; None: all."""
    for name in schema.names:
        if schema.names.count(name) > 1:
            raise InputError(f"{path}: has the column {name!r} twice")
    readable = [field.name for field in schema if _is_json(field.type)]
    for key in needed:
        name = key if key in schema.names else key.partition(".")[0]
        if name in schema.names and name not in readable:
            raise InputError(
                f"{path}: the column {name!r} is of type {schema.field(name).type}; supported are text, "
                "numbers, booleans, and lists and structs of them"
            )
    return None if len(readable) == len(schema.names) else readable


def _is_json(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        return _is_json(kind.value_type)
    if types.is_map(kind):
        return _is_text(kind.key_type) and _is_json(kind.item_type)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_json(kind.value_type)
    if types.is_struct(kind):
        return all(_is_json(kind.field(i).type) for i in range(kind.num_fields))
    simple = (types.is_null, types.is_boolean, types.is_integer, types.is_floating)
    return _is_text(kind) or any(test(kind) for test in simple)


def _is_text(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))
