"""Models and data sets by name: fetched from a stand-in of the Hub, then found without a network."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from hub_server import SHA, hub
from launch import REPO
from megatron_fspo.config import Config
from megatron_fspo.config.loading import load_config
from megatron_fspo.data.hub import find_checkpoint, from_hub
from megatron_fspo.errors import InputError

MODEL = REPO / "examples/make_sum/checkpoint"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "cache"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "gsm8k"
    for name in ("main/train-0.jsonl", "main/test-0.jsonl", "socratic/train-0.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"question": "1+1?", "answer": "It is #### 2"}) + "\n")
    return folder


def use(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def run(checkpoint: str, train: str, validation: str) -> Config:
    named = {"model.checkpoint": checkpoint, "data.train": train, "data.validation": validation}
    words = [word for key, value in named.items() for word in (f"--{key}", value)]
    return load_config(REPO / "examples/make_sum/run.toml", words)


def test_names_are_fetched_once_and_pinned(cache: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run("org/tiny", "gsm8k", "openai/gsm8k")
    teacher = config.teacher.model_copy(update={"checkpoint": Path("org/tiny")})
    config = config.model_copy(update={"teacher": teacher})
    with hub({"org/tiny": MODEL}, {"openai/gsm8k": data}) as (address, asked):
        use(monkeypatch, address)
        found = from_hub(config)
        assert from_hub(config) == found
        first = len(asked)
        assert from_hub(config) == found and len(asked) == first
    assert found.model.checkpoint.name == SHA and found.teacher.checkpoint == found.model.checkpoint
    assert {p.name for p in MODEL.glob("*.json")} <= {p.name for p in found.model.checkpoint.iterdir()}
    (train,), (validation,) = found.data.train_sets, found.data.validation_sets
    assert (train.preset, train.title, train.file.name) == ("gsm8k", "gsm8k", "train-0.jsonl")
    assert (validation.preset, validation.file.name) == ("gsm8k", "test-0.jsonl")
    assert train.file.parent.name == "main" and SHA in train.file.parts


def test_without_a_network_the_command_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"org/tiny is neither.*`hf download org/tiny`"):
        find_checkpoint(Path("org/tiny"))
    with pytest.raises(InputError, match="`hf download --repo-type dataset openai/gsm8k`"):
        from_hub(run(str(MODEL), "gsm8k", "gsm8k"))


def test_paths_stay() -> None:
    config = run(str(MODEL), "missing/train.jsonl", "a/b/c.jsonl")
    assert from_hub(config) == config
    assert find_checkpoint(Path("folder/of/three")) == Path("folder/of/three")


def test_several_files_must_be_named(cache: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub({}, {"org/sums": data}) as (address, _):
        use(monkeypatch, address)
        with pytest.raises(InputError, match=r"it has main/test-0\.jsonl, .*name one: org/sums:FILE"):
            from_hub(run(str(MODEL), "org/sums", str(data / "main/test-0.jsonl")))
        one = from_hub(run(str(MODEL), "org/sums:socratic/train-0.jsonl", "x.jsonl"))
        assert one.data.train_sets[0].file.parts[-2:] == ("socratic", "train-0.jsonl")


def test_half_a_download_is_fetched_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    index = {"weight_map": {"a": "model.safetensors", "b": "second.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "second.safetensors").write_bytes(b"x")
    with hub({"org/tiny": model}, {}) as (address, _):
        use(monkeypatch, address)
        second = find_checkpoint(Path("org/tiny")) / "second.safetensors"
        second.unlink()
        find_checkpoint(Path("org/tiny"))
        assert second.read_bytes() == b"x"
    second.unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="org/tiny is neither"):
        find_checkpoint(Path("org/tiny"))
