"""The words of ``megatron-fspo evaluate``: flags, a configuration, both; and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import REPO
from megatron_fspo.cli import make_parser
from megatron_fspo.cli.evaluate import KEYS, make_evaluation_config
from megatron_fspo.config import Config
from megatron_fspo.config.loading import legal_keys
from megatron_fspo.errors import InputError

MODEL = "examples/make_sum/checkpoint"
DATA = "examples/make_sum/validation.jsonl"
RUN = "examples/make_sum/run.toml"


@pytest.fixture(autouse=True)
def _root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)


def config(*words: str) -> Config:
    return make_evaluation_config(*make_parser().parse_known_args(["evaluate", *words]))


def flags(out: Path, *more: str) -> Config:
    return config("--model", MODEL, "--data", DATA, "--reward", "make_sum", "--out", str(out), *more)


def test_flags_are_a_configuration(tmp_path: Path) -> None:
    found = flags(tmp_path / "out of the way/x")
    files = [str(one.file) for one in found.data.validation_sets]
    assert (str(found.model.checkpoint), files, found.reward.name) == (MODEL, [DATA], "make_sum")
    assert (found.evaluation.samples, found.evaluation.temperature, found.evaluation.top_p) == (16, 1, 1)
    assert found.rollout.engine == "embedded"
    # The model reads 256 tokens.
    assert (found.rollout.max_response_tokens, found.data.max_prompt_tokens) == (128, 128)
    assert not tmp_path.joinpath("out of the way").exists()


def test_every_flag_is_a_key_and_keys_come_last(tmp_path: Path) -> None:
    words = "--samples 3 --temperature 0.5 --top-p 0.9 --max-response-tokens 200 --engine vllm"
    found = flags(tmp_path, *words.split())
    assert (found.evaluation.samples, found.evaluation.temperature, found.evaluation.top_p) == (3, 0.5, 0.9)
    assert (found.rollout.max_response_tokens, found.data.max_prompt_tokens) == (200, 56)
    assert found.rollout.engine == "vllm"
    more = "--samples 3 --evaluation.samples 5 --parallel.tensor 2 --parallel.context 2 --run.seed 7"
    found = flags(tmp_path, *more.split())
    assert (found.evaluation.samples, found.parallel.tensor, found.run.seed) == (5, 2, 7)
    assert set(KEYS.values()) <= {key for key, _, _ in legal_keys()}


def test_a_run_evaluates_as_it_is_configured_but_for_flags(tmp_path: Path) -> None:
    found = config("--config", RUN)
    assert found.evaluation.samples == 64 and found.parallel.tensor == 2
    found = config("--config", RUN, "--model", "other", "--data", "a.jsonl", "b.jsonl", "--samples", "2")
    files = [str(one.file) for one in found.data.validation_sets]
    assert (str(found.model.checkpoint), files) == ("other", ["a.jsonl", "b.jsonl"])
    assert found.evaluation.samples == 2 and found.run.name == "demo"


def asked(found: Config) -> list[int]:
    return list(found.evaluation_samples.values())


def test_samples_of_every_set_or_of_each_file(tmp_path: Path) -> None:
    assert asked(flags(tmp_path, "--samples", "3")) == [3]
    two = ["--model", MODEL, "--reward", "make_sum", "--out", str(tmp_path), "--data", "a.jsonl", "b.jsonl"]
    assert asked(config(*two)) == [16, 16]
    assert asked(config(*two, "--samples", "4")) == [4, 4]
    assert asked(config(*two, "--samples", "4", "32")) == [4, 32]
    assert asked(config("--config", RUN, "--data", "a.jsonl", "b.jsonl", "--samples", "4", "32")) == [4, 32]


def test_samples_given_hold_before_those_of_a_file(tmp_path: Path) -> None:
    layer, sets = tmp_path / "layer.toml", "[{file = 'a.jsonl'}, {file = 'b.jsonl', samples = 32}]"
    layer.write_text(f"[data]\nvalidation = {sets}")
    files = ["--config", RUN, "--config", str(layer)]
    assert asked(config(*files)) == [64, 32]
    assert asked(config(*files, "--evaluation.samples", "8")) == [8, 32]
    assert asked(config(*files, "--samples", "2")) == [2, 2]
    assert asked(config(*files, "--samples", "2", "--data.validation", sets)) == [2, 32]
    assert config(*files, "--samples", "2").data.train == config(*files).data.train


FLAGS = f"--model {MODEL} --data {DATA} --reward make_sum --out {{tmp}}"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "--model, --data, --reward, --out, or --config"),
        (f"--model {MODEL} --out {{tmp}}", "needs --data, --reward, or --config"),
        (f"--config {RUN} --compare {{tmp}}", "--compare needs --out"),
        (f"--config {RUN} --out {{tmp}}/file/x", "--out: {tmp}/file/x"),
        (f"--config {RUN} --samples 0", "--evaluation.samples = 0"),
        (f"--config {RUN} --samples 2 3", "--samples has 2 numbers and --data 0 files"),
        (f"--config {RUN} --data a b --samples 2 0", "data.validation[1].samples = 0"),
        (f"{FLAGS} --top-p 2", "--evaluation.top_p = 2.0"),
        (f"{FLAGS} --max-response-tokens -1", "--rollout.max_response_tokens = -1"),
        (f"--model {{tmp}} --data {DATA} --reward make_sum --out {{tmp}}", "{tmp}/config.json"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(tmp_path: Path, words: str, told: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError) as caught:
        config(*words.format(tmp=tmp_path).split())
    assert told.format(tmp=tmp_path) in str(caught.value) and "\n" not in str(caught.value)
