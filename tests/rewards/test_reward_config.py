"""The section ``reward``: keys that are tables, keys that must agree, and what is said of wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from megatron_fspo.config.loading import load_config, save_config
from megatron_fspo.errors import InputError

REQUIRED = {
    "run": {"steps": 3},
    "model": {"checkpoint": "checkpoint"},
    "data": {"train": "train.jsonl"},
    "rollout": {"prompts": 8, "max_response_tokens": 100},
}
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda name: name != "math")
weights = st.dictionaries(names, st.floats(allow_nan=False, allow_infinity=False).filter(bool), max_size=3)


def write(path: Path, **reward: object) -> Path:
    path.write_text(tomli_w.dumps(REQUIRED | {"reward": {"name": "math"} | reward}), encoding="utf-8")
    return path


@given(also=weights)
def test_further_rewards_are_read_as_they_were_written(
    also: dict[str, float], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    config = load_config(write(folder / "also.toml", also=also))
    assert config.reward.also == also and config.reward.names == ("math", *also)
    save_config(config, folder / "written.toml")
    assert load_config(folder / "written.toml") == config


@pytest.mark.parametrize(
    ("words", "also"),
    [
        (["--reward.also.format", "0.1"], {"format": 0.1}),
        (["--reward.also.my_package.rewards:f=-0.5"], {"my_package.rewards:f": -0.5}),
        (
            ["--reward.also.format=1", "--reward.also.http", "2", "--reward.url", "http://x"],
            {"format": 1, "http": 2},
        ),
        (["--reward.also", '{format = 0.1, "m:f" = 2}'], {"format": 0.1, "m:f": 2}),
        (["--reward.also", "{format = 0.1}", "--reward.also.format", "0.2"], {"format": 0.2}),
    ],
)
def test_further_rewards_on_the_command_line(
    tmp_path: Path, words: list[str], also: dict[str, float]
) -> None:
    assert load_config(write(tmp_path / "run.toml"), words).reward.also == also
    added = load_config(write(tmp_path / "run.toml", also={"g:h": 3}), words).reward.also
    assert added == (also if words[0] == "--reward.also" else also | {"g:h": 3})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--reward.also.format=x", "reward.also.format = 'x': "),
        ("--reward.also.format=nan", "reward.also.format = nan: "),
        ("--reward.also.format=true", "'format' must be a number"),
        ("--reward.also.format=0", "'format' is 0"),
        ("--reward.also=3", "reward.also = 3: "),
        ("--reward.also=3 --reward.also.format=1", "reward.also is a section"),
        ("--reward.also.math=1", "reward.also has 'math'"),
        ("--reward.alsoo.format=1", "did you mean reward.also?"),
        ("--reward.name=http", "needs reward.url"),
        ("--reward.url=http://x", "reward.url = http://x"),
        ("--reward.extract=box", "reward.extract = 'box': input should be 'auto', 'boxed'"),
        ("--reward.overlong-tokens=101", "overlong_tokens = 101"),
        ("--reward.memory-gb=-1", "reward.memory_gb = -1"),
    ],
)
def test_what_is_said_of_wrong_keys(tmp_path: Path, words: str, told: str) -> None:
    with pytest.raises(InputError) as caught:
        load_config(write(tmp_path / "run.toml"), words.split())
    assert told in str(caught.value) and "\n" not in str(caught.value)
