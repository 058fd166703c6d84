"""A step under way is refused where its old log-probs would not be those of this run."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest

from launch import REPO
from megatron_fspo.config import Config
from megatron_fspo.errors import InputError
from megatron_fspo.trainer.made_with import check_made_with, made_with


def config(recipe: str, **sections: dict[str, Any]) -> Config:
    """The run of make-sum on a GPU, with changes."""
    base = tomllib.loads((REPO / "examples/make_sum/run.toml").read_text(encoding="utf-8"))
    base["model"] |= {"dtype": "bfloat16", "backend": "cuda"}
    base["parallel"] = {}
    for name, change in {"fp8": {"recipe": recipe}, **sections}.items():
        base[name] = base.get(name, {}) | change
    return Config.model_validate(base)


def goes_on(before: Config, after: Config, ranks: tuple[int, int] = (4, 4)) -> None:
    """From a checkpoint: what was made with travels as JSON."""
    check_made_with(after, ranks[1], json.loads(json.dumps(made_with(before, ranks[0]))))


PRECISION = [
    ("fp8.recipe", "blockwise", {"fp8": {"recipe": "mxfp8"}}),
    ("fp8.recipe", "blockwise", {"fp8": {"recipe": "none"}}),
    ("fp8.recipe", "none", {"fp8": {"recipe": "tensorwise"}}),
    ("fp8.format", "blockwise", {"fp8": {"recipe": "blockwise", "format": "hybrid"}}),
    ("fp8.first_last_layers_bf16", "mxfp8", {"fp8": {"recipe": "mxfp8", "first_last_layers_bf16": 1}}),
]
PACKS = [
    ("batch.max_tokens", {"batch": {"max_tokens": 8192}}),
    ("batch.balance", {"batch": {"balance": "attention"}}),
    ("batch.mini_batches", {"batch": {"mini_batches": 2}}),
    ("parallel.tensor", {"parallel": {"tensor": 2}}),
    ("parallel.context", {"parallel": {"context": 2}}),
    ("parallel.pipeline", {"parallel": {"pipeline": 2}}),
    ("loss.entropy_coef > 0", {"loss": {"entropy_coef": 0.01}}),
]


@pytest.mark.parametrize(("key", "recipe", "change"), PRECISION)
def test_another_precision_is_refused(key: str, recipe: str, change: dict[str, Any]) -> None:
    changed = config(recipe, **change)
    with pytest.raises(InputError, match=rf"{key}: .*were computed in another precision"):
        goes_on(config(recipe), changed)
    # The sampler's log-probs do not depend on the trainer's precision.
    sampled = {"rollout": {"old_log_probs": "sampled"}}
    goes_on(config(recipe), config(recipe, **change, **sampled))


def test_another_dtype_is_refused() -> None:
    """Before, the run went on, and S was rounding."""
    with pytest.raises(InputError, match=r"model\.dtype: bfloat16 -> float32 within a step"):
        goes_on(config("none"), config("none", model={"dtype": "float32"}))
    before = made_with(config("none"), 4)
    del before["model.dtype"]  # as earlier versions wrote it
    check_made_with(config("none", model={"dtype": "float32"}), 4, before)


@pytest.mark.parametrize(("key", "change"), PACKS)
def test_other_packs_are_refused_with_a_scale_per_tensor_only(key: str, change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=rf"{key}.*: .*fp8.recipe = tensorwise .*depend on the packs"):
        goes_on(config("tensorwise"), config("tensorwise", **change))
    for recipe in ("none", "blockwise", "mxfp8"):
        goes_on(config(recipe), config(recipe, **change))


def test_another_number_of_ranks_is_another_split() -> None:
    with pytest.raises(InputError, match="the number of ranks: 4 -> 2"):
        goes_on(config("tensorwise"), config("tensorwise"), ranks=(4, 2))
    goes_on(config("blockwise"), config("blockwise"), ranks=(4, 2))


def test_what_changes_no_product_may_change() -> None:
    change = {"optimizer": {"lr": 1e-5}, "parallel": {"distributed_optimizer": True}, "batch": {"epochs": 3}}
    goes_on(config("tensorwise"), config("tensorwise", **change))
    goes_on(config("none"), config("none", fp8={"format": "hybrid", "first_last_layers_bf16": 1}))


def test_a_checkpoint_of_before_there_was_fp8_was_made_without() -> None:
    check_made_with(config("none"), 4, None)
    with pytest.raises(InputError, match=r"fp8\.recipe: none -> blockwise"):
        check_made_with(config("blockwise"), 4, None)
