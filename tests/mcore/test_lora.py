"""Adapters of one layer on one rank against dense matrices in float64, and their first values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from launch import REPO
from megatron_fspo.mcore.model.lora import LINEAR, _added, _install, first_values, without_adapters
from megatron_fspo.weights import Adapters, read_architecture
from megatron_fspo.weights.table import TARGETS

ARCH = replace(
    read_architecture(REPO / "examples/make_sum/checkpoint"),
    hidden_size=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=5,
    ffn_size=7,
)
SIZES = {"q": 20, "k": 10, "v": 10, "o": 12, "gate": 7, "up": 7, "down": 12}


class Linear(torch.nn.Module):
    """A linear layer as Megatron's: it returns (product, bias)."""

    sequence_parallel = False

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs, dtype=torch.float64))
        self.config = TransformerConfig(num_layers=1, hidden_size=12, num_attention_heads=4)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x @ self.weight.t(), None


@pytest.fixture
def group(one_rank: None) -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


CHOSEN = [TARGETS, ("q", "gate", "o"), ("k", "v", "up", "down"), ("v", "down")]
CASES = [
    (layer, chosen) for layer in LINEAR for chosen in CHOSEN if not set(LINEAR[layer]).isdisjoint(chosen)
]


@pytest.mark.parametrize(("layer", "chosen"), CASES)
@pytest.mark.parametrize("scale", [0.25, 3.0])
def test_a_layer_with_adapters_is_the_dense_sum(
    layer: str, chosen: tuple[str, ...], scale: float, group: dist.ProcessGroup
) -> None:
    torch.manual_seed(3)
    targets = LINEAR[layer]
    arch = replace(ARCH, adapters=Adapters(rank=3, scale=scale, targets=chosen))
    inputs = {"o": 20, "down": 7}.get(targets[0], 12)
    module = Linear(inputs, sum(SIZES[target] for target in targets))
    _install(module, targets, arch, group)
    dense = {}
    for target in targets:
        dense[target] = torch.zeros(SIZES[target], inputs, dtype=torch.float64)
        if target in chosen:
            factors = module.adapters[target]
            assert all(bool(factor.isnan().all()) for factor in factors.values()), "unless they are filled"
            for factor in factors.values():
                factor.data.normal_()
            dense[target] = scale * factors["b"].detach() @ factors["a"].detach()
    if "q" in targets:  # two query heads, a key head and a value head for each of two groups
        rows = [dense[target].view(2, -1, inputs) for target in targets]
        added = torch.cat(rows, dim=1).flatten(0, 1)
    else:
        added = torch.cat([dense[target] for target in targets])
    x = torch.randn(2, 4, inputs, dtype=torch.float64, requires_grad=True)
    out, _ = module(x)
    weight = module.weight.detach() + added
    torch.testing.assert_close(out, x @ weight.t(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(_added(module, module.weight, arch), added, rtol=1e-12, atol=1e-12)
    there = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, x, there)
    torch.testing.assert_close(gradient, there @ weight, rtol=1e-12, atol=1e-12)
    with without_adapters([module]):
        assert module(x)[0].equal(x @ module.weight.t())


def test_first_values() -> None:
    name = "model.layers.3.self_attn.q_proj.lora_{}.weight"
    first = first_values(name.format("A"), (16, 400), seed=1)
    assert first.equal(first_values(name.format("A"), (16, 400), seed=1))
    others = [first_values(name.format("A"), (16, 400), seed=2)]
    others += [
        first_values(one.format("A"), (16, 400), seed=1) for one in (name.replace("3", "4"), "v" + name)
    ]
    for other in others:
        assert abs(torch.corrcoef(torch.stack([first.flatten(), other.flatten()]))[0, 1]) < 0.05
    limit = 1 / math.sqrt(400)
    assert 0.99 * limit < first.max() <= limit and -limit <= first.min() < -0.99 * limit
    assert first.std() == pytest.approx(limit / math.sqrt(3), rel=0.03) and abs(first.mean()) < 0.02 * limit
    assert first_values(name.format("B"), (16, 400), seed=1).count_nonzero() == 0
