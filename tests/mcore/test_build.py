"""What a model is before its weights are loaded, and what one that is not trained does without."""

from __future__ import annotations

from pathlib import Path

from families import write_checkpoint
from launch import run_worker


def test_models_are_built_without_random_numbers_and_evaluated_without_an_optimizer(
    random_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    worker = Path(__file__).with_name("build_worker.py")
    write_checkpoint("qwen2", tmp_path)
    folders = [random_checkpoints["tied"], random_checkpoints["untied"], tmp_path]
    said = run_worker(worker, *map(str, folders), nproc=2)
    assert said.count("held") == 2
