"""FP8: what was asked for is there, or nothing starts; S is 0 before the first update; weights are fresh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch import found_by

LAYERS = 4  # of the random checkpoints


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, random_checkpoints: dict[str, Path]) -> Any:
    folder = tmp_path_factory.mktemp("fp8")
    worker = Path(__file__).with_name("fp8_worker.py")
    return found_by(worker, folder, str(random_checkpoints["untied"]), nproc=2)


RECIPES = ["tensorwise", "blockwise"]


@pytest.mark.parametrize("recipe", [*RECIPES, "mxfp8"])
def test_all_matrices_of_all_layers_are_counted(found: Any, recipe: str) -> None:
    assert found[recipe]["modules"] == 4 * LAYERS
    assert found[recipe]["noise"] > 1e-3, "nothing was quantised"
    assert found["tensorwise"]["bf16 modules"] == 0


def test_a_layer_left_in_bf16_is_named(found: Any) -> None:
    refused = found["tensorwise"]["refused"]
    assert "layer 2, self_attention.linear_proj (TERowParallelLinear) of rank 0" in refused
    assert "2 of 2 ranks" in refused


@pytest.mark.parametrize("recipe", RECIPES)
def test_with_the_weights_their_fp8_copies_are_lent(found: Any, recipe: str) -> None:
    assert found[recipe]["lent"] == {"FP8 tensors": [4 * LAYERS, 0], "same": True}


@pytest.mark.parametrize("recipe", [*RECIPES, "mxfp8"])
def test_before_the_first_update_s_is_exactly_zero(found: Any, recipe: str) -> None:
    assert found[recipe]["S"] == [0.0, 0.0]
    if recipe in RECIPES:
        assert found[recipe]["later S"] == [0.0, 0.0]
        assert found[recipe]["moved"] > 0.01


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_point_where_those_of_bf16_do_and_recompute_has_the_same(found: Any, recipe: str) -> None:
    assert found[recipe]["gradient"] > 0.9
    assert found[recipe]["recompute"] == {"same": True, "S": 0.0}


def test_other_packs_have_other_log_probs_with_a_scale_per_tensor_only(found: Any) -> None:
    """Why all passes of a step take the same packs, and a step under way is refused others."""
    assert found["tensorwise"]["other packs"]["S"] > 0.1
    assert found["tensorwise"]["other packs"]["of the band"] > 1
    for recipe in ("blockwise", "mxfp8"):
        assert found[recipe]["other packs"]["of the band"] < 1e-3


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_pass_multiplies_with_weights_of_before_the_update(found: Any, recipe: str) -> None:
    here = found[recipe]
    assert here["fresh"] is True and here["canary is fresh"] is True
    assert here["in bf16"] == {"decode": True, "canary": True}
    assert min(here["stale"].values()) > 0.01, "the test would not see stale weights"
    assert here["weights are the masters' cast"] is True and here["goes on"] is True
