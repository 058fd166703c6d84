"""What is left out of a file and counted, and what a file is refused for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from megatron_fspo.config.data import Data
from megatron_fspo.data.prompts import LoadedSet, load_sets, notes
from megatron_fspo.errors import InputError

Rows = list[tuple[str, str]]
A, B, C = ("p", "1"), ("q", "2"), ("p", "3")


def load(folder: Path, tokenizer: PreTrainedTokenizerFast, rows: Rows, **keys: Any) -> LoadedSet:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in rows))
    (found,) = load_sets(Data.model_validate({"train": path, **keys}), "train", tokenizer)
    return found


def pairs(found: LoadedSet) -> Rows:
    assert [prompt.index for prompt in found.prompts] == list(range(len(found.prompts)))
    return [(prompt.text, prompt.answer) for prompt in found.prompts]


def test_a_row_that_comes_again_is_left_out(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    found = load(tmp_path, tokenizer, [A, B, A, A, B])
    assert pairs(found) == [A, B]
    assert (found.rows, found.dropped) == (5, {"duplicate": 3})
    assert notes([found])[0].startswith(f"{tmp_path}/rows.jsonl: 2 prompts of 5 rows; left out: 3 with")
    assert notes([load(tmp_path, tokenizer, [A, B, A], duplicates="keep")]) == ()


def test_two_answers_to_a_prompt(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InputError, match=r"rows.jsonl:3: .*rows.jsonl:1 .* data.conflicts to "):
        load(tmp_path, tokenizer, [A, B, C])
    dropped = load(tmp_path, tokenizer, [A, B, C, A], conflicts="drop")
    assert pairs(dropped) == [B] and dropped.dropped == {"conflicting": 2, "duplicate": 1}
    assert pairs(load(tmp_path, tokenizer, [A, B, C, A], conflicts="keep")) == [A, B, C]
    with pytest.raises(InputError, match=r"rows.jsonl: holds no prompts: all 2 rows are left out"):
        load(tmp_path, tokenizer, [A, C], conflicts="drop")


def test_long_prompts_are_left_out_if_asked_for(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [("1234", "a"), ("12345", "b"), ("123", "c")]
    with pytest.raises(InputError, match=r"rows.jsonl:2: 'prompt' has 5 tokens, max_prompt_tokens is 4"):
        load(tmp_path, tokenizer, rows, max_prompt_tokens=4)
    found = load(tmp_path, tokenizer, rows, max_prompt_tokens=4, too_long="drop")
    assert pairs(found) == [rows[0], rows[2]]
    assert notes([found])[0].endswith("left out: 1 longer than data.max_prompt_tokens")


def test_a_text_and_one_message_of_the_user_are_the_same_question(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    message = [{"role": "user", "content": "p"}]
    found = load(tmp_path, tokenizer, [A, (message, "1"), B], chat_template=True)  # type: ignore[list-item]
    assert found.dropped == {"duplicate": 1} and len(found.prompts) == 2


def test_sets_are_numbered_through_and_each_cleared_by_itself(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    tables = []
    for name, rows in {"x": [A, B, A], "y": [A, C]}.items():
        (tmp_path / name).write_text("".join(f'{{"prompt": "{p}", "answer": "{a}"}}\n' for p, a in rows))
        tables.append({"file": tmp_path / name})
    data = Data.model_validate({"train": tables, "conflicts": "keep"})
    x, y = load_sets(data, "train", tokenizer)
    assert [(p.index, p.dataset, p.answer) for p in (*x.prompts, *y.prompts)] == [
        (0, "x", "1"),
        (1, "x", "2"),
        (2, "y", "1"),
        (3, "y", "3"),
    ]
    assert load_sets(data, "validation", tokenizer) == ()


@given(
    rows=st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("123")), min_size=1, max_size=12),
    duplicates=st.sampled_from(["drop", "keep"]),
    conflicts=st.sampled_from(["error", "drop", "keep"]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
def test_against_a_table_of_all_rows(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, rows: Rows, duplicates: str, conflicts: str
) -> None:
    doubtful = {p for p, a in rows if any(p == q and a != b for q, b in rows)}
    expected = list(dict.fromkeys(rows)) if duplicates == "drop" else rows
    if conflicts == "drop":
        expected = [row for row in expected if row[0] not in doubtful]
    if (conflicts == "error" and doubtful) or not expected:
        with pytest.raises(InputError):
            load(tmp_path, tokenizer, rows, duplicates=duplicates, conflicts=conflicts)
        return
    found = load(tmp_path, tokenizer, rows, duplicates=duplicates, conflicts=conflicts)
    assert pairs(found) == expected
    assert found.rows == len(found.prompts) + found.dropped.total()
