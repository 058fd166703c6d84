"""FP8 as the GPU does it, beside the emulated one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_fspo.config.fp8 import FP8

pytestmark = pytest.mark.gpu

RECIPES = [recipe for recipe in FP8.model_fields["recipe"].annotation.__args__ if recipe != "none"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_quantize_bit_for_bit_as_the_emulation(
    needs: Callable[..., None], measured: Any, table: Any, recipe: str
) -> None:
    needs(engine=True, recipe=recipe)
    found = measured(f"quantizer:{recipe}")
    for case, unequal in found["unequal"].items():
        table(f"FP8 {recipe}", f"values unlike fp8_values.py's: {case}", unequal, 0, f"of {found['values']}")
    assert len(found["unequal"]) == 4 and not any(found["unequal"].values())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_policy_in_fp8(needs: Callable[..., None], measured: Any, table: Any, recipe: str) -> None:
    needs(engine=True, recipe=recipe)
    found = measured(f"fp8:{recipe}")
    item = f"FP8 {recipe}"
    table(item, "matrices in FP8", found["modules"], found["expected_modules"])
    table(item, "largest S in size before the first update", found["s"], 0.0, "nats")
    table(item, "log-probs against bf16: σ (beside: emulated)", found["noise"], found["emulated"], "nats")
    table(item, "drift of these (beside: -σ²/2)", found["mean"], -(found["noise"] ** 2) / 2, "nats")
    table(item, "their correlation with the emulated ones", found["alike"])
    table(item, "other packs: σ (beside: in bf16)", found["packs"], found["packs_bf16"], "nats")
    assert found["modules"] == found["expected_modules"]
    assert found["s"] == 0.0 and found["later_s"] == 0.0
    assert found["moved"] > 0, "the update changed nothing that the second S could have missed"
    # The emulation differs in the order of sums and in where it rounds to bf16, not in size.
    assert 0.75 < found["noise"] / found["emulated"] < 1.33
    assert found["noise"] > 2 * found["layers"], "no more than two kinds of layers in bf16 differ by"
    assert found["alike"] > 0.3
    if recipe != "tensorwise":  # whose scales are those of the pack
        assert found["packs"] < found["noise"] / 2
