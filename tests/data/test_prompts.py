"""Reading the prompt file: what is accepted, and one clear line for everything that is not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from megatron_fspo.data.prompts import load_set
from megatron_fspo.data.tasks import Source
from megatron_fspo.errors import InputError
from megatron_fspo.types import Prompt


def load_prompts(
    path: Path, tokenizer: PreTrainedTokenizerFast, *, max_prompt_tokens: int, **keys: Any
) -> tuple[Prompt, ...]:
    source = Source(file=path, name=path.stem, **keys)
    return load_set(source, tokenizer, max_prompt_tokens=max_prompt_tokens).prompts


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def ids(text: str) -> tuple[int, ...]:
    return tuple(ord(character) - 32 for character in text)


def test_reads_prompts_as_they_stand(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(
        tmp_path,
        '{"prompt": "1+1=", "answer": "2", "level": 3}\n'
        "\n  \t\r\n"
        '{"prompt": " 2+3=", "answer": 5}\r\n'
        '{"answer": 1.50, "prompt": "x"}',
    )
    assert tokenizer("1+1=")["input_ids"][0] == 95, "this tokenizer adds a BOS where it may"
    first = {"prompt": "1+1=", "answer": "2", "level": 3}
    second = {"prompt": " 2+3=", "answer": 5}
    third = {"answer": 1.5, "prompt": "x"}
    assert load_prompts(path, tokenizer, max_prompt_tokens=5) == (
        Prompt(index=0, token_ids=ids("1+1="), text="1+1=", answer="2", fields=first, dataset="prompts"),
        Prompt(index=1, token_ids=ids(" 2+3="), text=" 2+3=", answer="5", fields=second, dataset="prompts"),
        Prompt(index=2, token_ids=ids("x"), text="x", answer="1.50", fields=third, dataset="prompts"),
    )


def test_fields_are_json_types(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    row = '{"prompt": "p", "answer": 1e3, "n": [1, -2.50, {"x": 1E2}], "none": null, "t": true, "nan": NaN}'
    (prompt,) = load_prompts(write(tmp_path, row), tokenizer, max_prompt_tokens=9)
    assert prompt.answer == "1e3"
    fields = {
        "prompt": "p",
        "answer": 1000.0,
        "n": [1, -2.5, {"x": 100.0}],
        "none": None,
        "t": True,
        "nan": None,
    }
    assert prompt.fields == fields
    assert [type(value) for value in prompt.fields["n"]] == [int, float, dict]
    assert type(prompt.fields["answer"]) is float and prompt.fields["t"] is True
    json.dumps(prompt.fields, allow_nan=False)


def test_a_special_token_written_in_the_file_is_one_token(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write(tmp_path, '{"prompt": "<s>hi", "answer": "1"}')
    (prompt,) = load_prompts(path, tokenizer, max_prompt_tokens=3)
    assert prompt.token_ids == (95, *ids("hi"))
    assert type(prompt.answer) is str


def test_chat_template(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "1+1", "name": "Ada"}]
    rows = [{"prompt": "1+1", "answer": "2"}, {"prompt": messages, "answer": "2"}]
    path = write(tmp_path, "\n".join(map(json.dumps, rows)))
    single, several = load_prompts(path, tokenizer, chat_template=True, max_prompt_tokens=99)
    assert single.text == "[user]1+1;[assistant]"
    assert single.token_ids == ids(single.text)
    assert several.text == "[system];[user]1+1;[assistant]"


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}
TOOLS = "{{ tools | tojson if tools else '' }}{{ '(short)' if short }}"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"tools": [TOOL]}, f"{json.dumps([TOOL])}[user]1+1;[assistant]"),
        ({"tools": json.dumps([TOOL])}, f"{json.dumps([TOOL])}[user]1+1;[assistant]"),
        ({"chat_template_kwargs": {"short": True}}, "(short)[user]1+1;[assistant]"),
        ({"tools": [], "chat_template_kwargs": None, "images": []}, "[user]1+1;[assistant]"),
        ({"prompt": json.dumps([{"role": "user", "content": "1+1"}])}, "[user]1+1;[assistant]"),
        ({"prompt": "[{not a talk}]"}, "[user][{not a talk}];[assistant]"),
        ({"prompt": '[{"a": 1}]'}, '[user][{"a": 1}];[assistant]'),
    ],
)
def test_all_parts_of_a_prompt_are_rendered(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, more: dict[str, Any], text: str
) -> None:
    tokenizer.chat_template = TOOLS + str(tokenizer.chat_template)
    path = write(tmp_path, json.dumps({"prompt": "1+1", "answer": "2", **more}))
    (prompt,) = load_prompts(path, tokenizer, chat_template=True, max_prompt_tokens=999)
    assert prompt.text == text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tools": [TOOL]}, "'tools' is no variable of the chat template"),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            "'enable_thinking' is no variable of the chat",
        ),
        ({"chat_template_kwargs": {"tokenize": True}}, "'chat_template_kwargs' must be an object without"),
        ({"tools": "add"}, "'tools' is not JSON"),
        ({"tools": {"add": 1}}, "'tools' must be a list of objects, got an object"),
        ({"images": ["a.png"]}, "'images' holds media: only text is supported"),
        (
            {"prompt": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]},
            "'prompt' ends",
        ),
    ],
)
def test_a_part_that_cannot_be_rendered_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, more: dict[str, Any], said: str
) -> None:
    path = write(tmp_path, json.dumps({"prompt": "1+1", "answer": "2", **more}))
    with pytest.raises(InputError, match=f"prompts.jsonl:1: {said}"):
        load_prompts(path, tokenizer, chat_template=True, max_prompt_tokens=999)
    if "tools" in more and isinstance(more["tools"], list):
        with pytest.raises(InputError, match="'tools' is for a chat template"):
            load_prompts(path, tokenizer, max_prompt_tokens=999)


def test_rows_that_differ_in_tools_alone_are_no_duplicates(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = TOOLS + str(tokenizer.chat_template)
    rows = [{"prompt": "1+1", "answer": "2"}, {"prompt": "1+1", "answer": "2", "tools": [TOOL]}]
    path = write(tmp_path, "\n".join(map(json.dumps, rows)))
    assert len(load_prompts(path, tokenizer, chat_template=True, max_prompt_tokens=999)) == 2


def test_a_line_ends_at_a_line_feed_only(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(
        tmp_path, '{"prompt": "a\u2028b\x85c", "answer": "x\u2029"}\n{"prompt": "d", "answer": "1"}\n'
    )
    first, second = load_prompts(path, tokenizer, max_prompt_tokens=9)
    assert (first.text, first.answer, second.text) == ("a\u2028b\x85c", "x\u2029", "d")


@given(
    rows=st.lists(
        st.tuples(
            st.text(st.characters(codec="ascii", min_codepoint=32, max_codepoint=126), min_size=1),
            st.text().filter(str.strip),
        ),
        min_size=1,
        unique_by=lambda row: row[0],
    ),
    ascii_only=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
def test_round_trip(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, rows: list[tuple[str, str]], ascii_only: bool
) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": p, "answer": a}, ensure_ascii=ascii_only) for p, a in rows]
    if not ascii_only and any(0xD800 <= ord(c) < 0xE000 for line in lines for c in line):
        return  # cannot be written
    path.write_bytes("\n".join(lines).encode())
    found = load_prompts(path, tokenizer, max_prompt_tokens=10**6)
    assert [(p.text, p.answer) for p in found] == rows
    assert [p.index for p in found] == list(range(len(rows)))


LEVELS = 600 if sys.version_info < (3, 12) else 995  # each two frames of Python's, and then one
DEEP = "('x' is nested too deeply|not JSON: maximum recursion)"
GOOD = '{"prompt": "a", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "not JSON: Expecting"),
        ("[" * 100_000, "not JSON: maximum recursion"),
        ('["a", "1"]', "must be an object, got a list"),
        ("17", "must be an object, got a number"),
        ('{"text": "a", "answer": "1"}', "no key 'prompt'; the keys here are 'text', 'answer'"),
        ("{}", "no key 'prompt'; the keys here are none"),
        ('{"prompt": null, "answer": "1"}', "'prompt' must be .* got null"),
        (
            '{"prompt": [{"role": "tool", "content": ""}, {"role": "user", "content": "a"}], "answer": "1"}',
            "'prompt' must be .* messages of tool, user",
        ),
        ('{"prompt": "a", "answer": " \\n"}', "'answer' is empty"),
        ('{"prompt": "a", "answer": "1", "x": [{"y": 1, "y": 2}]}', "not JSON: the key 'y' occurs twice"),
        ('{"prompt": "a", "answer": "1", "x": ' + "[" * LEVELS + "]" * LEVELS + "}", DEEP),
        ('{"prompt": "a", "answer": "1", "x": ' + "9" * 5000 + "}", "'x' has an integer of more than 4,300"),
        ('\ufeff{"prompt": "a", "answer": "1"}', "not JSON: Unexpected UTF-8 BOM"),
        ('{"prompt": "a", "answer": true}', "'answer' must be .* got a boolean"),
        ('{"prompt": "a", "answer": {"x": 1}}', "'answer' must be .* got an object"),
        ('{"prompt": "a", "answer": NaN}', "'answer' must be .* got NaN or an infinity"),
        ('{"prompt": "", "answer": "1"}', "'prompt' is empty"),
        ('{"prompt": "ж", "answer": "1"}', "'prompt' is empty: it has no tokens"),
        ('{"prompt": "123456", "answer": "1"}', "'prompt' has 6 tokens, max_prompt_tokens is 5"),
        ('{"prompt": "\\ud800", "answer": "1"}', "not UTF-8: "),
        (b'{"prompt": "\xff", "answer": "1"}', "not UTF-8: "),
    ],
)
def test_a_bad_line(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, line: str | bytes, message: str
) -> None:
    raw = line.encode() if isinstance(line, str) else line
    path = write(tmp_path, GOOD.encode() + b"\n" + raw + b"\n" + GOOD.encode())  # a duplicate is no fault
    with pytest.raises(InputError, match=f"^.*prompts.jsonl:3: {message}") as caught:
        load_prompts(path, tokenizer, max_prompt_tokens=5)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


NO_MESSAGES: list[Any] = [[], 7, ["a"], {"role": "user"}, [{"role": "user", "content": 3}]]
NO_MESSAGES += [[{"role": "user", "content": "a"}, {"role": "user"}]]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        *((bad, "'prompt' must be a string or a list of messages") for bad in NO_MESSAGES),
        ([{"role": "user", "content": ""}], "'prompt' is empty"),
        ([{"role": "tool", "content": "a"}], "the chat template rejects 'prompt': no tools here$"),
        ("x" * 33, "'prompt' has 51 tokens, max_prompt_tokens is 50"),
    ],
)
def test_a_bad_chat_prompt(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, prompt: Any, message: str
) -> None:
    path = write(tmp_path, json.dumps({"prompt": prompt, "answer": "1"}))
    with pytest.raises(InputError, match=f"prompts.jsonl:1: {message}"):
        load_prompts(path, tokenizer, chat_template=True, max_prompt_tokens=50)


def test_a_byte_order_mark_and_carriage_returns_are_read_over(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [b'{"prompt": "a", "answer": "1"}', b'{"prompt": "b", "answer": "2"}']
    path = write(tmp_path, b"\xef\xbb\xbf" + b"\r\n".join(rows) + b"\r\n")
    assert [(p.text, p.answer) for p in load_prompts(path, tokenizer, max_prompt_tokens=1)] == [
        ("a", "1"),
        ("b", "2"),
    ]
    with pytest.raises(InputError, match=r"prompts.jsonl:1: not UTF-8"):
        load_prompts(write(tmp_path, rows[0].decode().encode("utf-16")), tokenizer, max_prompt_tokens=1)


@pytest.mark.parametrize("content", ["", "\n", "  \n\r\n\t", b"\xef\xbb\xbf"])
def test_an_empty_file(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, content: str | bytes) -> None:
    with pytest.raises(InputError, match=r"prompts.jsonl: holds no prompts"):
        load_prompts(write(tmp_path, content), tokenizer, max_prompt_tokens=5)
