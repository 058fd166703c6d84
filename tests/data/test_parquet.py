"""Parquet: nested rows in batches, and one line for every file that is not as it should be."""

from __future__ import annotations

import datetime
import io
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from transformers import PreTrainedTokenizerFast

from megatron_fspo.config.data import Data
from megatron_fspo.data.parquet import read_parquet
from megatron_fspo.data.prompts import load_sets, notes
from megatron_fspo.data.rows import read_rows
from megatron_fspo.errors import InputError
from megatron_fspo.types import Prompt

GOOD = {"prompt": "a", "answer": "1"}


def write(folder: Path, rows: list[dict[str, Any]] | pyarrow.Table, **options: Any) -> Path:
    path = folder / "rows.parquet"
    table = rows if isinstance(rows, pyarrow.Table) else pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, path, **options)
    return path


def load(path: Path, tokenizer: PreTrainedTokenizerFast, **keys: Any) -> tuple[Prompt, ...]:
    (found,) = load_sets(Data.model_validate({"train": path, **keys}), "train", tokenizer)
    return found.prompts


def test_nested_rows_become_fields(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    deep = {"list": [{"y": None}, {"y": 2}]}
    rows = [
        {"prompt": "a", "answer": "1", "n": 3, "x": 0.5, "b": True, "deep": deep},
        {"prompt": "b", "answer": "2", "n": None, "x": float("nan"), "b": None, "deep": None},
    ]
    first, second = load(write(tmp_path, rows), tokenizer)
    assert first.fields == rows[0] and type(first.fields["n"]) is int
    assert second.fields == {**rows[1], "x": None}
    assert (second.index, second.text, second.answer, second.dataset) == (1, "b", "2", "rows")


@pytest.mark.parametrize(
    ("column", "answers"),
    [
        (pyarrow.array([7, 12]), ["7", "12"]),
        (pyarrow.array([2**63, 1], pyarrow.uint64()), ["9223372036854775808", "1"]),
        (pyarrow.array([1.5, 27.0]), ["1.5", "27.0"]),
        (pyarrow.array(["1.50", "x"], pyarrow.large_string()), ["1.50", "x"]),
        (pyarrow.array(["same", "same"]).dictionary_encode(), ["same", "same"]),
        (pyarrow.array(["one", "two"], pyarrow.string_view()), ["one", "two"]),
    ],
)
def test_kinds_of_answers(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, column: pyarrow.Array, answers: list[str]
) -> None:
    table = pyarrow.table({"prompt": ["a", "b"], "answer": column})
    assert [prompt.answer for prompt in load(write(tmp_path, table), tokenizer)] == answers


def test_a_map_is_an_object(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    kind = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    table = pyarrow.table(
        {"prompt": ["a"], "answer": ["1"], "m": pyarrow.array([[("x", 1), ("y", 2)]], kind)}
    )
    (prompt,) = load(write(tmp_path, table), tokenizer)
    assert prompt.fields["m"] == {"x": 1, "y": 2}
    twice = table.set_column(2, "m", pyarrow.array([[("x", 1), ("x", 2)]], kind))
    with pytest.raises(InputError, match=r"rows.parquet: row 1: 'm' cannot be read"):
        load(write(tmp_path, twice), tokenizer)


def test_tools_of_several_rows_keep_their_own_keys(tmp_path: Path) -> None:
    """Arrow has one structure for all rows of a column, with nulls for what a row lacks."""
    calls = [[{"arguments": {"a": 1}}], [{"arguments": {"city": "Oslo", "b": {"c": None}}}]]
    rows = [
        {"tools": [{"parameters": arguments[0]["arguments"]}], "calls": arguments, "extra": {"n": n}}
        for n, arguments in zip((None, 1), calls, strict=True)
    ]
    read = list(read_parquet(write(tmp_path, rows)))
    assert [row["calls"] for row in read] == [
        [{"arguments": {"a": 1}}],
        [{"arguments": {"city": "Oslo", "b": {}}}],
    ]
    assert [row["tools"] for row in read] == [
        [{"parameters": {"a": 1}}], [{"parameters": {"city": "Oslo", "b": {}}}]
    ]  # fmt: skip
    assert [row["extra"] for row in read] == [{"n": None}, {"n": 1}]


def test_columns_that_json_has_no_word_for_are_left_out(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    kinds = {"picture": b"\xff", "day": datetime.date(2026, 1, 2), "price": Decimal("1.5"), "list": [b""]}
    nested = {**GOOD, **kinds, "box": {"picture": b"\xff", "x": 1}, "level": 2}
    path = write(tmp_path, [nested])
    (prompt,) = load(path, tokenizer)
    assert prompt.fields == {"prompt": "a", "answer": "1", "level": 2}
    (note,) = notes(load_sets(Data(train=path), "train", tokenizer))
    assert all(f"the column {name} (" in note for name in (*kinds, "box")), note
    with pytest.raises(InputError, match=r"the column 'images' is of type list<.*binary"):
        load(write(tmp_path, [{**GOOD, "images": [{"bytes": b"x"}]}]), tokenizer)
    for key, kind in (("picture", "binary"), ("day", "date32"), ("price", "decimal"), ("box.x", "struct<")):
        with pytest.raises(InputError, match=rf"rows.parquet: the column '{key[:3]}\w*' is of type {kind}"):
            load(write(tmp_path, [nested]), tokenizer, answer_key=key)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.none() | st.lists(st.none() | st.floats(width=32), max_size=5), max_size=2500),
    kind=st.sampled_from([pyarrow.list_(pyarrow.float32()), pyarrow.large_list(pyarrow.float64())]),
    plain=st.booleans(),
)
@example(rows=[[float(i)] * (i % 4) for i in range(2500)], kind=pyarrow.list_(pyarrow.float32()), plain=True)
def test_lists_of_numbers_are_read_as_arrow_reads_them(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], kind: pyarrow.DataType, plain: bool
) -> None:
    """Those without a gap take a faster way."""
    if plain:
        rows = [[number or 0.0 for number in row or []] for row in rows]
    path = tmp_path_factory.mktemp("lists") / "lists.parquet"
    table = pyarrow.table({"n": range(len(rows)), "numbers": pyarrow.array(rows, kind)})
    parquet.write_table(table, path)
    assert repr(list(read_parquet(path))) == repr(table.to_pylist())


def test_a_file_is_read_in_batches(tmp_path: Path) -> None:
    """Of 40,000 rows of 1 kB, in one row group, not many are there at once."""
    text = "x" * 1000
    path = write(tmp_path, [{"prompt": f"{n}{text}"} for n in range(40_000)], compression="zstd")
    before = pyarrow.total_allocated_bytes()
    most = 0
    for number, row in enumerate(read_rows(path)):
        assert row.location == f"{path}: row {number + 1}"
        if number % 1000 == 0:
            assert row.tree()["prompt"] == f"{number}{text}"
            most = max(most, pyarrow.total_allocated_bytes() - before)
    assert number == 39_999
    assert most < 20e6


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([GOOD, {"prompt": "b", "answer": None}], "row 2: 'answer' .* got null"),
        ([{"prompt": b"a", "answer": "1"}], "the column 'prompt' is of type binary"),
        ([{"prompt": [{"role": "user", "content": None}], "answer": "1"}], "row 1: 'prompt' must be"),
        ([{"text": "a"}], "row 1: no key 'prompt'"),
    ],
)
def test_wrong_rows(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, Any]], told: str
) -> None:
    with pytest.raises(InputError, match=f"rows.parquet: {told}") as caught:
        load(write(tmp_path, rows), tokenizer)
    assert "\n" not in str(caught.value)


def test_text_that_is_not_utf_8(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    names = ["a"] * 1500 + ["b\xff"]
    column = pyarrow.array([name.encode("latin-1") for name in names]).view(pyarrow.string())
    path = write(tmp_path, pyarrow.table({"prompt": column, "answer": ["1"] * 1501}))
    with pytest.raises(InputError, match=r"rows.parquet: row 1501: 'prompt' cannot be read: 'utf-8' codec"):
        load(path, tokenizer)


def test_files_that_are_not_parquet(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    whole = write(tmp_path, [GOOD] * 100, compression="none").read_bytes()
    path = tmp_path / "broken.parquet"
    for content in (b"", whole[:-1], whole[:100], b'{"prompt": "a"}\n', b"\xef\xbb\xbf" + whole):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"broken.parquet: not parquet, cut short or") as caught:
            load(path, tokenizer)
        assert "\n" not in str(caught.value)
    for name in ("none.parquet", ""):
        with pytest.raises(InputError, match=r"cannot read the prompts: (No such file|Is a directory)"):
            load(tmp_path / name, tokenizer)


def test_a_column_that_is_there_twice(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    table = pyarrow.Table.from_arrays(
        [pyarrow.array(["a"])] * 2 + [pyarrow.array(["1"])], ["prompt", "prompt", "answer"]
    )
    with pytest.raises(InputError, match=r"rows.parquet: has the column 'prompt' twice"):
        load(write(tmp_path, table), tokenizer)


def whole_files() -> list[bytes]:
    rows = [
        {"prompt": f"{n} times 7?", "answer": str(n * 7), "m": {"z": [1, 2, None]}, "x": n / 3}
        for n in range(9)
    ]
    files = []
    for compression in ("none", "snappy", "zstd"):
        stream = io.BytesIO()
        parquet.write_table(
            pyarrow.Table.from_pylist(rows), stream, compression=compression, row_group_size=4
        )
        files.append(stream.getvalue())
    return files


FILES = whole_files()
LINES = b'{"prompt": "a", "answer": 1.50, "x": [1, {"y": null}]}\n{"prompt": "b", "answer": "\\u0041"}\r\n'
PARTS = st.sampled_from(
    [b"{", b"}", b'"prompt"', b":", b",", b'"a"', b"1e999", b"\n", b"[", b"\\ud800", b"\xff", b"-"]
)
HOSTILE = st.one_of(
    st.binary(max_size=60),
    st.lists(PARTS, max_size=14).map(b"".join),
    st.just(b'{"prompt":"x","answer":"1"}\n'),
)


def prompts_or_one_line(path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    try:
        prompts = load(path, tokenizer, conflicts="keep", chat_template=True, too_long="drop")
    except InputError as error:
        assert str(path) in str(error) and "\n" not in str(error)
        return
    for prompt in prompts:
        assert prompt.token_ids and prompt.answer.strip()
        json.dumps(prompt.fields, allow_nan=False)


@given(parts=st.lists(HOSTILE, max_size=4), at=st.integers(0, len(LINES)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
def test_any_bytes_are_prompts_or_one_line(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, parts: list[bytes], at: int
) -> None:
    path = tmp_path / "any.jsonl"
    path.write_bytes(LINES[:at] + b"".join(parts) + LINES[at:])
    prompts_or_one_line(path, tokenizer)


@given(
    number=st.integers(0, len(FILES) - 1),
    changes=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=3)), max_size=4
    ),
    cut=st.one_of(st.just(1.0), st.floats(0, 1)),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
def test_a_damaged_file_is_prompts_or_one_line(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    number: int,
    changes: list[tuple[float, bytes]],
    cut: float,
) -> None:
    content = bytearray(FILES[number])
    for place, new in changes:
        at = int(place * len(content))
        content[at : at + len(new)] = new
    path = tmp_path / "any.parquet"
    path.write_bytes(content[: round(cut * len(content))])
    prompts_or_one_line(path, tokenizer)
