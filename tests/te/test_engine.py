"""Transformer Engine's modules in training: what the tests of all backends cannot ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch import found_by

LAYERS = 4  # of the random checkpoints


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, random_checkpoints: dict[str, Path]) -> Any:
    folder = tmp_path_factory.mktemp("engine")
    worker = Path(__file__).with_name("engine_worker.py")
    return found_by(worker, folder, str(random_checkpoints["untied"]), nproc=2)


def test_layers_and_optimizer_are_its_own(found: Any) -> None:
    modules = found["modules"]
    # Of each layer qkv, projection and two of the MLP; norms of queries and keys, the other two within.
    assert modules["linear"] == 4 * LAYERS
    assert modules["norm"] == 2 * LAYERS + 1
    assert modules["attention"] == LAYERS
    package, _, optimizer = modules["optimizer"].partition(".")
    assert package == "transformer_engine" and optimizer.endswith("FusedAdam")


def test_weight_gradients_go_straight_into_the_buffer_without_apex(found: Any) -> None:
    """The four matrices of each layer, for each micro-batch: one here."""
    assert found["modules"]["fused"] == 4 * LAYERS


def test_decoding_under_context_parallel_takes_no_attention_that_splits_rows(found: Any) -> None:
    assert found["decode"] < 1e-5


def test_a_prompt_is_shared(found: Any) -> None:
    assert found["sharing"] < 1e-5


def test_checkpoints_go_from_either_kind_of_layers_to_the_other(found: Any) -> None:
    assert len(found["checkpoints"]) == 10
    assert [name for name, same in found["checkpoints"].items() if not same] == []
