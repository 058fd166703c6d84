"""A run's model and card, uploaded to a stand-in of the Hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from hub_server import TOKEN, hub
from launch import REPO
from megatron_fspo.cli import main

MODEL = REPO / "examples/make_sum/checkpoint"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(MODEL, folder / "hf")
    shutil.copy(REPO / "examples/make_sum/run.toml", folder / "config.toml")
    accuracy = {f"val/held/mean@4{end}": value for end, value in (("", 0.5), ("/low", 0.4), ("/high", 0.6))}
    rows = [{"step": 0, **accuracy}, *({"step": step, "critic/rewards/mean": 0.5} for step in (1, 2))]
    rows[2] |= {name: value + 0.125 for name, value in accuracy.items()}
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_a_dry_run_shows_the_card(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(run), "org/mine", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "| held/mean@4 | 0.500 [0.400, 0.600] | 0.625 [0.525, 0.725] |" in out
    assert "after 2 steps of fspo" in out and "**Layout**" in out and "model.safetensors" in out


def test_the_model_is_uploaded_with_its_card(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    written: dict[str, bytes] = {}
    with hub({}, {}, written) as (address, asked):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setenv("HF_TOKEN", "another")
        assert main(["push", str(run), "org/mine"]) == 1
        assert "org/mine: the Hub does not take it" in capsys.readouterr().err
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert main(["push", str(run), "org/mine"]) == 0
    assert "org/mine/commit" in capsys.readouterr().out
    assert written["model.safetensors"] == (MODEL / "model.safetensors").read_bytes()
    assert written["fspo/config.toml"] == (run / "config.toml").read_bytes()
    assert b"| held/mean@4 |" in written["README.md"]
    assert any("/api/repos/create" in line for line in asked)


def test_what_is_missing_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "hf/config.json").unlink()
    assert main(["push", str(run), "org/mine"]) == 2
    assert "holds no exported model" in capsys.readouterr().err
