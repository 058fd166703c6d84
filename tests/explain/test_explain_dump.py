"""What is read from a dump, and what is refused: one line that names file, row and field."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet

from dumps import token_rows, walks, write
from megatron_fspo.cli import main
from megatron_fspo.errors import InputError
from megatron_fspo.lab.explain.dump import read_dump
from megatron_fspo.lab.explain.rows import NAMES


def test_json_lines_and_parquet_hold_the_same(tmp_path: Path) -> None:
    for name, rows in (("sums", walks(50)), ("tokens", token_rows(50))):
        lines = read_dump(write(tmp_path / f"{name}.jsonl", rows), {})
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
        table = read_dump(tmp_path / f"{name}.parquet", {})
        for field in ("rows", "lengths", "log_ratio_sum", "advantages", "log_ratio"):
            torch.testing.assert_close(getattr(lines, field), getattr(table, field))
        assert lines.rows.tolist() == list(range(1, 51))


def test_s_and_l_follow_from_tokens(tmp_path: Path) -> None:
    row = {"log_probs": [-1.0, -2.0, -0.5], "old_log_probs": [-1.5, -2.0, -0.25], "advantage": 1}
    dump = read_dump(write(tmp_path / "a.jsonl", [row]), {})
    assert dump.lengths.tolist() == [3] and dump.log_ratio_sum.tolist() == [0.25]
    assert dump.log_ratio is not None and dump.log_ratio.tolist() == [0.5, 0.0, -0.25]
    assert dump.sampler_gap is None and dump.rewards is None


def test_names_and_padding_of_trl_and_verl(tmp_path: Path) -> None:
    new, old, mask = [-1.0, -2.0, 0.0, 99.0], [-1.5, -2.0, 0.0, math.nan], [1, 1, 0, 0]
    trl = {"per_token_logps": new, "old_per_token_logps": old, "completion_mask": mask, "advantages": -1.0}
    prime = {"trainer_logprobs": new, "inference_logprobs": old, "loss_mask": [True, True, False, False]}
    verl = {"log_prob": new, "old_log_prob": old, "response_mask": mask, "advantages": [-1.0, -1.0, 0.0, 0.0]}
    mine = {"length": 2, "log_ratio_sum": 0.5, "advantage": -1.0}
    ours = read_dump(write(tmp_path / "ours.jsonl", [mine]), {})
    for name, row in (("trl", trl), ("verl", verl), ("prime-rl", prime | {"advantages": [-1.0] * 4})):
        dump = read_dump(write(tmp_path / f"{name}.jsonl", [row]), {})
        assert dump.lengths.tolist() == [2]
        assert dump.log_ratio_sum.tolist() == ours.log_ratio_sum.tolist() == [0.5]
        assert dump.advantages.tolist() == [-1.0]
    nulls = [-1.0, -2.0, None, None]  # prime-rl's for what is not finite
    rows = [prime | {"advantages": -1.0, "trainer_logprobs": nulls, "rl_weights": [None] * 4, "planted": 1}]
    rows += [rows[0]] * 30 + [rows[0] | {"trainer_logprobs": [None] * 4}]
    dump = read_dump(write(tmp_path / "nulls.jsonl", rows), {})
    assert dump.log_ratio_sum.tolist() == [0.5] * 31
    assert (dump.nonfinite, dump.unread) == (1, ("planted",))


def test_masks_of_all_trainers(tmp_path: Path) -> None:
    """A token counts where every mask has 1."""
    new, old = [-1.0, -9.0, -2.0, 99.0], [-1.5, -1.0, -2.0, 0.0]
    row: dict[str, Any] = {"log_prob": new, "old_log_prob": old, "advantages": 1.0}
    whole, written = {"attention_mask": [1] * 9}, [1, 0, 1, 0]
    masks: list[dict[str, Any]] = [
        *({name: written} for name in NAMES["mask"]),
        *({"completion_mask": [1, 1, 1, 0], name: [1, 0, 1, 1]} for name in ("tool_mask", "loss_mask")),
    ]
    for mask in masks:
        dump = read_dump(write(tmp_path / "a.jsonl", [row | mask | whole]), {})
        assert (dump.lengths.tolist(), dump.log_ratio_sum.tolist()) == ([2], [0.5]), mask
    for mask, said in (
        ({"my_mask": written}, "'my_mask' is an unknown mask"),
        ({"mask": written, "tool_mask": [1]}, "the masks have 1 and 4 tokens"),
    ):
        with pytest.raises(InputError, match=said):
            read_dump(write(tmp_path / "a.jsonl", [row | mask]), {})
    assert len(read_dump(write(tmp_path / "a.jsonl", [row | {"my_mask": written}]), {"mask": "my_mask"})) == 1


def test_numbers_as_other_tools_write_them(tmp_path: Path) -> None:
    rows = [
        {"step": step, "length": 2.0, "log_ratio_sum": 0.5, "advantage": 1.0} for step in ("3", 3.0, 3, 4)
    ]
    assert read_dump(write(tmp_path / "a.jsonl", rows), {}, 3).lengths.tolist() == [2, 2, 2]
    removed = [rows[0], rows[1] | {"remove_sample": True}, rows[2] | {"remove_sample": False}]
    dump = read_dump(write(tmp_path / "a.jsonl", removed), {})
    assert (len(dump), dump.empty) == (2, 1)
    with pytest.raises(InputError, match=r"length = 2\.5"):
        read_dump(write(tmp_path / "a.jsonl", [rows[0] | {"length": 2.5}]), {})
    halves = {
        name: pyarrow.array([[first, -2.0]], pyarrow.list_(pyarrow.float16()))
        for name, first in (("log_prob", -1.0), ("old_log_prob", -1.5))
    }
    parquet.write_table(pyarrow.table({**halves, "advantages": [1.0]}), tmp_path / "a.parquet")
    assert read_dump(tmp_path / "a.parquet", {}).log_ratio_sum.tolist() == [0.5]


def test_what_counts_nowhere_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = walks(40)
    rows[3]["length"] = 0
    rows[5]["log_ratio_sum"] = math.nan
    dump = read_dump(write(tmp_path / "a.jsonl", rows), {})
    assert (len(dump), dump.empty, dump.nonfinite) == (38, 1, 1)
    assert not {4, 6} & set(dump.rows.tolist())


def test_a_run_of_ours_by_step(tmp_path: Path) -> None:
    first = {"length": [3, 4], "log_ratio_sum": [0.1, -0.1], "advantage": [1.0, -1.0], "clipped": [1, 0]}
    second = {"length": [5], "log_ratio_sum": [0.2], "advantage": [1.0], "clipped": [False]}
    steps = [{"step": 1, **first}, {"step": 2, **second}]
    write(tmp_path / "sequences.jsonl", steps)
    assert read_dump(tmp_path, {}).lengths.tolist() == [3, 4, 5]
    assert read_dump(tmp_path, {}).rows.tolist() == [1, 1, 2]
    assert read_dump(tmp_path, {}, step=2).lengths.tolist() == [5]
    with pytest.raises(InputError, match="no responses of step 3"):
        read_dump(tmp_path, {}, step=3)


GOOD = {"length": 2, "log_ratio_sum": 0.5, "advantage": 1.0}
TOKENS = {"log_probs": [-1.0, -2.0], "old_log_probs": [-1.5, -2.0], "advantage": 1.0}


def without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


LINE = json.dumps(GOOD).encode() + b"\n"
BROKEN: list[tuple[list[dict[str, Any]] | bytes, str]] = [
    ([], "d.jsonl: holds no responses"),
    ([GOOD, without(GOOD, "advantage")], "d.jsonl:2: no field 'advantage'"),
    ([GOOD, without(GOOD, "length")], "d.jsonl:2: no field 'length'"),
    ([without(GOOD, "log_ratio_sum")], "d.jsonl:1: no field 'log_ratio_sum'"),
    ([without(TOKENS, "old_log_probs")], "d.jsonl:1: 'log_probs' without 'old_log_probs'"),
    ([{**GOOD, "advantages": 1.0}], "d.jsonl:1: 'advantage' and 'advantages' both mean advantage"),
    ([GOOD, {**GOOD, "length": 2.5}], "d.jsonl:2: length = 2.5"),
    ([GOOD, {**GOOD, "length": True}], "d.jsonl:2: length = True"),
    ([GOOD, {**GOOD, "length": 10**30}], "d.jsonl:2: length = 1000000000"),
    ([GOOD, {**GOOD, "length": 2**62}], "d.jsonl:2: length = 4611686018427387904"),
    ([GOOD, {**GOOD, "update": 2**70}], "d.jsonl:2: update = 1180591620717411303424"),
    ([GOOD, {**GOOD, "log_ratio_sum": None}], "d.jsonl:2: log_ratio_sum = null"),
    ([GOOD, {**GOOD, "advantage": "1"}], "d.jsonl:2: advantage = '1'"),
    ([GOOD, {**GOOD, "log_ratio_sum": math.inf}], "d.jsonl:2: S or the advantage is not finite"),
    ([TOKENS, {**TOKENS, "log_probs": [-1.0]}], "d.jsonl:2: log_probs has 1 tokens and old_log_probs 2"),
    ([{**TOKENS, "length": 3}], "d.jsonl:1: length = 3, but log_probs has 2"),
    ([{**TOKENS, "log_ratio_sum": 0.25}], "d.jsonl:1: log_ratio_sum = 0.25, but"),
    ([{**TOKENS, "log_probs": [0.9, -2.0]}], "d.jsonl:1: log_probs[0] = 0.9"),
    ([{**TOKENS, "log_probs": [-1.0, "x"]}], "d.jsonl:1: log_probs = [-1.0, 'x']"),
    ([{**TOKENS, "sampled_log_probs": [-1.0, -math.inf]}], "d.jsonl:1: sampled_log_probs must be finite"),
    ([{**TOKENS, "mask": [1, 1, 0]}], "d.jsonl:1: mask has 3 tokens and log_probs 2"),
    ([{**TOKENS, "mask": [1, 0.5]}], "d.jsonl:1: mask must be 1"),
    ([{**TOKENS, "advantage": [1.0, 0.5]}], "d.jsonl:1: advantage is 0.5 at one token and 1 at another"),
    ([TOKENS, GOOD], "d.jsonl:2: log_probs is in some rows and not in others"),
    ([{**GOOD, "log_ratio_sum": 0.0}], "d.jsonl: log_ratio_sum is 0 in all 1 responses"),
    ([{**GOOD, "length": 0}], "d.jsonl: all 1 responses are empty"),
    ([{**GOOD, "length": [2, 3], "log_ratio_sum": [0.5]}], "d.jsonl:1: log_ratio_sum must be a list"),
    (LINE + LINE[:-9] + b"\n", "d.jsonl:2: not JSON"),
    (LINE + b"[1, 2]\n", "d.jsonl:2: not an object"),
    (LINE + b"\xff\xfe\n", "d.jsonl:2: not text in UTF-8"),
    (LINE + b'{"length": 2, "length": 3}\n', "d.jsonl:2: not JSON: the key 'length' occurs twice"),
]


@pytest.mark.parametrize(("content", "words"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_row_is_named_in_one_line(
    tmp_path: Path, content: list[dict[str, Any]] | bytes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "d.jsonl"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        write(path, content)
    assert main(["explain", str(path), "--out", str(tmp_path / "out")]) == 2
    out, line = capsys.readouterr()
    assert out == "" and line.count("\n") == 1 and line.startswith("megatron-fspo: ") and words in line
    assert not (tmp_path / "out").exists()


def test_more_responses_than_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_fspo.lab.explain.dump._MOST", 50)
    parquet.write_table(pyarrow.Table.from_pylist(walks(50)), tmp_path / "d.parquet")
    assert len(read_dump(tmp_path / "d.parquet", {})) == 50
    parquet.write_table(pyarrow.Table.from_pylist(walks(51)), tmp_path / "d.parquet")
    with pytest.raises(InputError, match="more than 50 responses"):
        read_dump(tmp_path / "d.parquet", {})


def test_parquet_that_is_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(walks(50)), path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(InputError, match=r"d\.parquet: not parquet, cut short or damaged"):
        read_dump(path, {})
    parquet.write_table(pyarrow.Table.from_pylist([GOOD, {**GOOD, "advantage": None}]), path)
    with pytest.raises(InputError, match=r"d\.parquet: row 2: advantage = null"):
        read_dump(path, {})


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match="pip install pyarrow"):
        read_dump(tmp_path / "d.parquet", {})
