"""Checkpoints: any layout, optimizer and dtype from any other; in the background; what memory they take."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from launch import forked, run_worker, why

pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("checkpoint_worker.py")


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory,
    random_checkpoints: dict[str, Path],
    moe_checkpoints: dict[str, Path],
) -> list[Any]:
    """By rank."""
    out = tmp_path_factory.mktemp("saved")
    model = out / "model"
    shutil.copytree(random_checkpoints["tied"], model)
    config = json.loads((model / "config.json").read_text())
    (out / "narrow").mkdir()
    narrow = {**config, "num_attention_heads": 2, "num_key_value_heads": 2}
    (out / "narrow/config.json").write_text(json.dumps(narrow))
    arguments = [str(out), str(model), str(moe_checkpoints["moe"])]
    killed = forked([str(WORKER), *arguments, "killed"], nproc=2)
    assert killed.returncode != 0 and (out / "experts.pt").exists(), why(killed.stderr)
    # Half a checkpoint is beside the whole one; the next save removes it, and the whole one loads.
    assert (out / "second.partial/torch_dist").is_dir() and not (out / "second").exists()
    run_worker(WORKER, *arguments, nproc=4, timeout=600)
    return json.loads((out / "found.json").read_text())


@pytest.mark.parametrize("check", ["resume", "experts", "megatron", "background", "damage", "refusals"])
def test_every_rank_finds(found: list[Any], check: str) -> None:
    wrong = {(rank, name) for rank, all_ in enumerate(found) for name, ok in all_[check].items() if not ok}
    assert not wrong
    assert found[0][check]


def test_memory_of_a_save_and_a_load_is_bounded(found: list[Any]) -> None:
    """A gather took 30 bytes for each parameter of the model, which is 120 for each of the shard."""
    print(found[0]["memory"])
    assert found[0]["memory"]["save"] < 6
    assert found[0]["memory"]["load"] < 6
