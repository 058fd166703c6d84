"""The section ``data``: one file or tables of several, in TOML and on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import REPO
from megatron_fspo.config import Config, DataSet
from megatron_fspo.config.loading import load_config, save_config
from megatron_fspo.errors import InputError

MAKE_SUM = REPO / "examples/make_sum/run.toml"
TABLES = """\
[data]
chat_template = true

[[data.train]]
file = "dapo.parquet"
preset = "dapo"
weight = 3

[[data.train]]
file = "own.jsonl"
name = "own"
weight = 1.5
template = "{prompt}\\nAnswer:"

[[data.validation]]
file = "aime_2024.jsonl"
preset = "aime"
"""


def load(*words: str) -> Config:
    return load_config(MAKE_SUM, words)


def test_a_path_is_one_set() -> None:
    data = load().data
    assert data.train == Path("examples/make_sum/train.jsonl")
    assert data.train_sets == (DataSet(file=Path("examples/make_sum/train.jsonl")),)
    assert [one.title for one in data.validation_sets] == ["validation"]
    assert load("--data.validation", "none").data.validation_sets == ()


def test_tables(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    text = MAKE_SUM.read_text()
    before, _, rest = text.partition("[data]")
    path.write_text(f"{before}{TABLES}[reward]{rest.partition('[reward]')[2]}")
    data = load_config(path).data
    first, second = data.train_sets
    assert (first.title, first.preset, first.weight) == ("dapo", "dapo", 3)
    assert (second.title, second.weight) == ("own", 1.5)
    assert second.template == "{prompt}\nAnswer:" and data.chat_template is True
    assert [one.title for one in data.validation_sets] == ["aime_2024"]
    save_config(load_config(path), tmp_path / "again.toml")
    assert load_config(tmp_path / "again.toml") == load_config(path)
    one = load_config(path, ["--data.train", "x.jsonl"]).data
    assert one.train == Path("x.jsonl") and one.validation_sets == data.validation_sets


def test_samples_of_a_set(tmp_path: Path) -> None:
    words = ["--evaluation.samples", "4"]
    sets = ("--data.validation", "[{file = 'a'}, {file = 'x/b', samples = 32, name = 'c'}]")
    assert load(*words).evaluation_samples == {"validation": 4}
    assert load(*words, *sets).evaluation_samples == {"a": 4, "c": 32}
    assert load(*words, "--data.validation", "none").evaluation_samples == {}
    save_config(load(*words, *sets), tmp_path / "again.toml")
    assert load_config(tmp_path / "again.toml").evaluation_samples == {"a": 4, "c": 32}


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("--data.train 1.50", "train", Path("1.50")),
        ("--data.train [{file='a b'}]", "train", (DataSet(file=Path("a b")),)),
        ("--data.chat-template true", "chat_template", True),
        ("--data.prompt-key 5", "prompt_key", "5"),
        ("--data.answer-after ####", "answer_after", "####"),
        ("--data.template '{prompt} {x}'", "template", "{prompt} {x}"),
    ],
)
def test_overrides(words: str, key: str, value: object) -> None:
    assert getattr(load(*words.split(" ", 1)).data, key) == value


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--data.train []", "data.train = []: "),
        ("--data.train ['a.jsonl']", "data.train[0] = 'a.jsonl': "),
        ("--data.train [{fil='a'}]", "unknown key data.train[0].fil; did you mean file? (and 1 more)"),
        ("--data.train [{file='a'},{name='b'}]", "data.train[1].file is missing"),
        ("--data.train [{file='a',weight=0}]", "data.train[0].weight = 0: "),
        ("--data.train [{file='x/a.jsonl'},{file='y/a.parquet'}]", "several sets are named a"),
        ("--data.train [{file='a',weight=1},{file='b'}]", "weight to every set"),
        ("--data.validation [{file='a',weight=1}]", "a has a weight"),
        ("--data.train [{file='a',samples=4}]", "a has samples"),
        ("--data.train [{file='a'},{file='b',weight=true}]", "data.train[1].weight = true: "),
        ("--data.preset dappo", "data.preset = 'dappo': "),
        ("--data.template box", "data.template = 'box': "),
        ("--data.chat-template maybe", "data.chat_template = 'maybe': "),
    ],
)
def test_a_wrong_section_is_told_in_one_line(words: str, told: str) -> None:
    with pytest.raises(InputError) as caught:
        load(*words.split(" ", 1))
    assert told in str(caught.value) and "\n" not in str(caught.value)
