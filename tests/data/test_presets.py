"""Every preset on a file of its format, written by hand; and how keys override it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

import pyarrow
import pytest
from pyarrow import parquet
from transformers import PreTrainedTokenizerFast

from megatron_fspo.config.data import TEMPLATES, Data, PresetName
from megatron_fspo.data.prompts import load_sets
from megatron_fspo.data.tasks import PRESETS, make_sources
from megatron_fspo.errors import InputError
from megatron_fspo.types import Prompt

SAMPLES = Path(__file__).with_name("samples")
BOXED = " Let's think step by step and output the final answer within \\boxed{}."
DAPO_QUESTION = TEMPLATES["dapo"].replace("{prompt}", "What is 6 times 7?")
TRAIN = "A train covers 27 miles in 30 minutes. How many miles is that in an hour?"
PLUMS = "4 bags of 6 plums and eats 5 plums. How many are left?"
PRIME = "Name the largest prime below 20."
DAPO = [
    {
        "data_source": "ours",
        "prompt": [{"role": "user", "content": DAPO_QUESTION}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "42", "style": "rule"},
        "extra_info": {"index": "a-1"},
    }
]


def load(tokenizer: PreTrainedTokenizerFast, **keys: Any) -> tuple[Prompt, ...]:
    (one,) = load_sets(Data.model_validate(keys), "train", tokenizer)
    return one.prompts


@pytest.fixture
def dapo(tmp_path: Path) -> Path:
    path = tmp_path / "dapo.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(DAPO), path)
    return path


def test_every_preset_is_there() -> None:
    assert tuple(PRESETS) == get_args(PresetName)
    samples = {path.stem for path in SAMPLES.glob("*.jsonl")}
    assert samples == {*PRESETS, "faulty"} - {"dapo"}


@pytest.mark.parametrize(
    ("preset", "text", "answers"),
    [
        ("raw", "A shelf holds 3 rows of 8 jars. How many jars is that?\nAnswer:", ["24", "1.50"]),
        (
            "math500",
            f"[user]Write $\\frac{{6}}{{8}}$ in lowest terms.{BOXED};[assistant]",
            ["\\frac{3}{4}", "4"],
        ),
        ("aime", f"[user]How many positive divisors has $2^5 \\cdot 3^4$?{BOXED};[assistant]", ["030", "1"]),
        ("amc", f"[user]{TRAIN}{BOXED};[assistant]", ["54.0", "5.0"]),
        ("gsm8k", f"[user]Ida has {PLUMS}{BOXED};[assistant]", ["19", "1,200"]),
        ("slime", f"[user]{PRIME} End with: Answer: <number>;[assistant]", ["19", "42"]),
    ],
)
def test_a_preset(tokenizer: PreTrainedTokenizerFast, preset: str, text: str, answers: list[str]) -> None:
    prompts = load(tokenizer, train=SAMPLES / f"{preset}.jsonl", preset=preset)
    assert prompts[0].text == text
    assert [prompt.answer for prompt in prompts] == answers
    assert {prompt.dataset for prompt in prompts} == {preset}


@pytest.mark.skipif(not os.environ.get("PRESET_FILES"), reason="PRESET_FILES names no folder of public files")
@pytest.mark.parametrize("preset", PRESETS)
def test_a_public_file(tokenizer: PreTrainedTokenizerFast, preset: str) -> None:
    """``<preset>.jsonl`` or ``.parquet`` in the folder: every row is a prompt, and its columns are those of
    our sample; a new one fails."""
    (path,) = [*Path(os.environ["PRESET_FILES"]).glob(f"{preset}.*")] or [None]
    if path is None:
        pytest.skip(f"no file for {preset}")
    prompts = load(tokenizer, train=path, preset=preset, conflicts="drop", too_long="drop")
    columns = {name for prompt in prompts for name in prompt.fields}
    samples = load(tokenizer, train=SAMPLES / f"{preset}.jsonl", preset=preset)
    known = {name for prompt in samples for name in prompt.fields}
    assert len(prompts) > 20 and columns <= known, columns - known


def test_dapo(tokenizer: PreTrainedTokenizerFast, dapo: Path) -> None:
    (prompt,) = load(tokenizer, train=dapo, preset="dapo")
    assert prompt.text == f"[user]{DAPO_QUESTION};[assistant]"
    assert prompt.answer == "42"
    assert prompt.fields == DAPO[0]


def test_base_models_get_text(tokenizer: PreTrainedTokenizerFast, dapo: Path) -> None:
    tokenizer.chat_template = None
    (prompt,) = load(tokenizer, train=dapo, preset="dapo", chat_template=False)
    assert prompt.text == DAPO_QUESTION
    with pytest.raises(InputError, match=r"dapo.parquet: chat_template is true"):
        load(tokenizer, train=dapo, preset="dapo")


def test_every_key_overrides_the_preset(tokenizer: PreTrainedTokenizerFast) -> None:
    keys = {
        "prompt_key": "solution",
        "answer_key": "unique_id",
        "answer_after": "/",
        "template": "Check {prompt} and {this}",
        "system_prompt": "Be brief.",
    }
    first, _ = load(tokenizer, train=SAMPLES / "math500.jsonl", preset="math500", **keys)
    assert first.text == (
        "[system]Be brief.;[user]Check Divide both by 2: $\\boxed{\\frac{3}{4}}$. and {this};[assistant]"
    )
    assert first.answer == "1"
    bare, _ = load(
        tokenizer, train=SAMPLES / "gsm8k.jsonl", preset="gsm8k", template="plain", answer_after=""
    )
    assert bare.text.startswith("[user]Ida") and "####" in bare.answer


def test_a_table_says_more_than_the_section_and_that_more_than_a_preset() -> None:
    data = Data.model_validate(
        {
            "train": [
                {"file": "a.jsonl", "preset": "gsm8k", "answer_key": "result"},
                {"file": "b.jsonl", "too_long": "drop", "chat_template": True, "template": "boxed"},
            ],
            "preset": "slime",
            "prompt_key": "ask",
            "chat_template": False,
        }
    )
    a, b = make_sources(data, "train")
    assert (a.prompt_key, a.answer_key, a.answer_after, a.chat_template) == ("ask", "result", "####", False)
    assert (a.template, a.too_long, a.name) == ("{prompt}" + BOXED, "error", "a")
    assert (b.prompt_key, b.answer_key, b.answer_after, b.chat_template) == ("ask", "label", "", True)
    assert (b.template, b.too_long, b.duplicates) == ("{prompt}" + BOXED, "drop", "drop")


SYSTEM = '{"p": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "a": "1"}'
ASSISTANT = '{"p": [{"role": "assistant", "content": "s"}], "a": "1"}'


@pytest.mark.parametrize(
    ("row", "keys", "told"),
    [
        ('{"p": "x", "a": {"b": 1}}', {"answer_key": "a.c"}, "no key 'a.c'; the keys in 'a' are 'b'"),
        ('{"p": "x", "a": "1"}', {"answer_key": "a.c"}, "no key 'a.c': 'a' is a string"),
        ('{"p": "x", "a": null}', {"answer_key": "a.b.c"}, "no key 'a.b.c': 'a' is null"),
        ('{"p": "x", "a": "12"}', {"answer_after": "####"}, "'a' has no '####'"),
        ('{"p": "x", "a": "12 ####  "}', {"answer_after": "####"}, "'a' is empty"),
        (SYSTEM, {"chat_template": True, "system_prompt": "t"}, "'p' already has a system message"),
        (SYSTEM.replace("user", "system"), {"chat_template": True, "template": "boxed"}, "'p' has no user"),
        (ASSISTANT, {"chat_template": True}, "'p' ends with a message of the assistant"),
    ],
)
def test_what_does_not_fit(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, row: str, keys: dict[str, Any], told: str
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(row)
    with pytest.raises(InputError, match=f"x.jsonl:1: {told}"):
        load(tokenizer, **{"train": path, "prompt_key": "p", "answer_key": "a"} | keys)


@pytest.mark.parametrize(
    ("row", "keys", "expected"),
    [
        ('{"a.b": "1", "a": {"b": "2"}, "prompt": "x"}', {"answer_key": "a.b"}, ("x", "1")),
        ('{"prompt": "x", "answer": "#### 3 no\\n#### 4 "}', {"answer_after": "####"}, ("x", "4")),
        (
            '{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, '
            '{"role": "user", "content": "c"}], "answer": "1"}',
            {"chat_template": True, "template": "<{prompt}>"},
            ("[user]a;[assistant]b;[user]<c>;[assistant]", "1"),
        ),
    ],
)
def test_a_key_with_a_dot_the_last_mark_and_the_last_message(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    row: str,
    keys: dict[str, Any],
    expected: tuple[str, str],
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(row)
    (prompt,) = load(tokenizer, train=path, **keys)
    assert (prompt.text, prompt.answer) == expected


def test_a_system_prompt_needs_a_chat(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InputError, match=r"raw.jsonl: system_prompt needs chat_template = true"):
        load(tokenizer, train=SAMPLES / "raw.jsonl", system_prompt="Be brief.")
