"""Conversations of a file as prompts and responses: which tokens count, and what is refused."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from megatron_fspo.config import Config
from megatron_fspo.data.cursor import digest_prompts
from megatron_fspo.data.prompts import LoadedSet, load_set
from megatron_fspo.data.tasks import make_source
from megatron_fspo.errors import InputError

STOP = "~"
TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}~{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}~"
    "{% endgeneration %}{% else %}{{ m.content }}~{% endif %}{% endfor %}"
)
# As Qwen3: an earlier turn of the assistant loses its thinking, the last one always has some.
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}(){% endif %}"
    "{{ m.content.split(')')[-1] }}~{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
DROPPING = (
    "{% for m in messages[-2:] %}<{{ m.role }}>{{ m.content }}~{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


SYSTEM = {"role": "system", "content": "Be brief."}
CALLING = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}


def load(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    *rows: dict[str, Any],
    template: str | None = TURNS,
    **keys: Any,
) -> LoadedSet:
    path = folder / "talks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    most = keys.pop("max_response_tokens", 500)
    data = Config.model_validate(
        {
            "run": {"steps": 1},
            "model": {"checkpoint": "c"},
            "loss": {"name": "sft"},
            "data": {"train": path, "preset": "messages" if template else "completion", **keys},
            "rollout": {"prompts": 1, "max_response_tokens": most},
        }
    ).data
    before, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        stops = tokenizer(STOP, add_special_tokens=False)["input_ids"]
        return load_set(
            make_source(data, data.train_sets[0]),
            tokenizer,
            max_prompt_tokens=500,
            stops=stops,
            max_response_tokens=most,
        )
    finally:
        tokenizer.chat_template = before


def talk(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]}


def learned(loaded: LoadedSet) -> list[tuple[str, str, str]]:
    """Of each row: its prompt, its response, and the characters of that which are learned."""
    rows = []
    for prompt in loaded.prompts:
        assert prompt.demonstration is not None
        ids, mask = prompt.demonstration.token_ids, prompt.demonstration.loss_mask
        text = "".join(chr(token + 32) for token in ids)
        rows.append(
            (prompt.text, text, "".join(c if one else "." for c, one in zip(text, mask, strict=True)))
        )
    return rows


words = st.text("abcdefg ", min_size=1, max_size=9).filter(lambda text: text.strip() == text)


@pytest.mark.parametrize("template", [TURNS, MARKED, MARKED + "!"])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(st.tuples(words, words), min_size=1, max_size=4))
def test_what_the_assistant_wrote_is_learned_with_its_stop_token(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, template: str, turns: list[tuple[str, str]]
) -> None:
    ((prompt, response, counted),) = learned(
        load(tmp_path, tokenizer, talk(*sum(turns, ())), template=template)
    )
    first, *later = turns
    assert prompt == f"<user>{first[0]}~<assistant>"
    assert response == f"{first[1]}~" + "".join(f"<user>{u}~<assistant>{a}~" for u, a in later)
    assert counted == f"{first[1]}~" + "".join(f"{'.' * len(f'<user>{u}~<assistant>')}{a}~" for u, a in later)


def test_thinking_that_the_template_adds_is_learned_where_it_stands(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    loaded = load(tmp_path, tokenizer, talk("a", "b", "c", "d"), template=THINKING)
    assert learned(loaded) == [
        ("<user>a~<assistant>", "b~<user>c~<assistant>()d~", "b~...................()d~")
    ]


def test_prompts_and_completions_without_a_template(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    calls = [
        {"role": "assistant", "content": "5="},
        {"role": "tool", "content": "12"},
        {"role": "assistant", "content": "9~"},
    ]
    rows = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "^17=", "completion": calls}]
    assert learned(load(tmp_path, tokenizer, *rows, template=None)) == [
        ("1+1=", "2~", "2~"),
        ("^17=", "5=129~", "5=..9~"),
    ]


@pytest.mark.parametrize(
    ("row", "template", "named"),
    [
        (talk("a", "b") | {"images": ["x.png"]}, TURNS, "'images' holds media"),
        ({"prompt": "a", "completion": "\N{SNOWMAN}"}, None, "the response has no tokens"),
        (talk("a", ""), TURNS, "message 2, of the assistant, is empty"),
        (talk("a", "b", "c"), TURNS, "ends with a message of user"),
        (talk("a", "b~c"), TURNS, "message 2, of the assistant, is not between its prompt and a stop token"),
        (talk("a", "b", "c", "d"), DROPPING, "drops what is before message 2"),
        ({"prompt": "a"}, TURNS, "no key 'messages'"),
        (talk("a", "(x)b", "c", "d"), THINKING, "message 2, of the assistant, is not between its prompt"),
        (talk("a", "b"), "{% generation %}{% endgeneration %}c", "no prompt before a turn"),
        (talk("a", "b" * 600), TURNS, "rollout.max_response_tokens is 500"),
        (talk("a", "b"), MARKED.replace("}}~{% endg", "}}{% endg"), "no stop token ends the response"),
        ({"prompt": [SYSTEM, {"role": "user", "content": "a"}], "completion": "b"}, None, "chat_template"),
        ({"prompt": "a", "completion": [CALLING | {"content": "b"}]}, None, "chat_template"),
    ],
)
def test_rows_that_are_refused_in_one_line(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], template: str | None, named: str
) -> None:
    with pytest.raises(InputError, match=r"^.*talks\.jsonl:1: [^\n]*$") as error:
        load(tmp_path, tokenizer, row, template=template)
    assert named in str(error.value)


def test_a_message_that_only_calls_a_tool(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """OpenAI's has null for its content."""
    row = {"messages": [*talk("a")["messages"], CALLING, *talk("c", "d")["messages"]]}
    template = TURNS.replace(
        "{{ m.content }}", "{{ m.content }}{{ m.tool_calls[0].function.name if m.tool_calls is defined }}"
    )
    assert learned(load(tmp_path, tokenizer, row, template=template)) == [
        ("<user>a~<assistant>", "add~<user>c~<assistant>d~", "add~...................d~")
    ]


def test_long_responses_can_be_dropped(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = talk("a", "b"), talk("c", "d" * 9)
    loaded = load(tmp_path, tokenizer, *rows, max_response_tokens=5, too_long="drop")
    assert (len(loaded.prompts), loaded.dropped["long response"]) == (1, 1)


def test_the_digest_of_the_data_changes_with_a_response(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    digests = {digest_prompts(load(tmp_path, tokenizer, talk("a", word)).prompts) for word in ("b", "c", "b")}
    assert len(digests) == 2


def test_the_digest_changes_with_the_mask(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (prompt,) = load(tmp_path, tokenizer, talk("a", "b")).prompts
    assert prompt.demonstration is not None
    masked = replace(prompt.demonstration, loss_mask=array("b", [0, 1]))
    assert digest_prompts([replace(prompt, demonstration=masked)]) != digest_prompts([prompt])
