"""What a plan says of adapters, and what may have one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from megatron_fspo.config import Parallel
from megatron_fspo.config.sections import LoRA
from megatron_fspo.errors import InputError
from megatron_fspo.lab.plan.presets import PRESETS
from megatron_fspo.lab.plan.shape import Shape
from megatron_fspo.lab.plan.state import checkpoint_bytes, state
from megatron_fspo.mcore.machine.sizes import make_adapters
from megatron_fspo.weights import adapter_shapes


def test_gradients_and_optimizer_are_of_adapters_only() -> None:
    arch = PRESETS["qwen3-1.7b"]
    parallel = Parallel(tensor=2, sequence=True)
    whole = Shape(arch=arch, parallel=parallel, world=2, dtype=torch.bfloat16, layers="local", device="cuda")
    adapted = replace(whole, arch=replace(arch, adapters=make_adapters(LoRA(rank=16), arch)))
    factors = {name: math.prod(shape) for name, shape in adapter_shapes(adapted.arch).items()}
    # Of a layer cut by its outputs B is cut, of the others A.
    cut = sum(
        count
        for name, count in factors.items()
        if ("lora_A" in name) == any(target in name for target in ("o_proj", "down_proj"))
    )
    mine = sum(factors.values()) - cut // 2
    before, after = state(whole, 0), state(adapted, 0)
    assert after.gradients == 4 * mine and after.optimizer == 12 * mine
    assert after.parameters == before.parameters + 2 * mine
    assert checkpoint_bytes(adapted) == 14 * sum(factors.values()) < 0.02 * checkpoint_bytes(whole)


def test_experts_have_none() -> None:
    arch = PRESETS["qwen3-30b-a3b"]
    adapters = make_adapters(LoRA(rank=4, alpha=8, rslora=True), arch)
    assert adapters is not None and adapters.targets == ("q", "k", "v", "o") and adapters.scale == 4.0
    with pytest.raises(InputError, match=r"lora\.targets: gate"):
        make_adapters(LoRA(rank=4, targets=("q", "gate")), arch)
    assert make_adapters(LoRA(), arch) is None


def test_keys_do_nothing_without_a_rank() -> None:
    with pytest.raises(ValidationError, match=r"lora\.targets needs lora\.rank"):
        LoRA(targets=("q",))
    LoRA.model_validate(LoRA().model_dump())  # as the config.toml of a run has it
