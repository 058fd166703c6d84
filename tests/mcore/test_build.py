"""What a model is before its weights are loaded, and what one that is not trained does without."""

from __future__ import annotations

from pathlib import Path

from launch import run_worker


def test_models_are_built_without_random_numbers_and_evaluated_without_an_optimizer(
    random_checkpoints: dict[str, Path],
) -> None:
    worker = Path(__file__).with_name("build_worker.py")
    said = run_worker(worker, str(random_checkpoints["tied"]), str(random_checkpoints["untied"]), nproc=2)
    assert said.count("held") == 2
