"""LoRA: adapters on Megatron's parallel linear layers, y = W x + scale · B A x with frozen W.

In a column-parallel layer (qkv, fc1) every tensor-parallel rank has all of A and a row slice of B; in a
row-parallel one (proj, fc2), a column slice of A and all of B. As in PEFT, q, k, v, gate and up each have
their own A. Collectives over tensor-parallel ranks carry r (the LoRA rank) numbers per token and target::

                    forward                      backward
    column          -                            all-reduce of d(A x)
    column, SP      all-gather of A x            reduce-scatter of d(A x)
    row             all-reduce of A x            -
    row, SP         reduce-scatter of A x        all-gather of d(A x)

Under sequence parallelism (SP) the unsliced factor sees only its rank's tokens; its attribute
``sequence_parallel`` makes Megatron sum its gradient over the ranks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module, ModuleDict, Parameter, ParameterDict

from megatron_fspo.mcore.model.gated_delta import GatedDeltaNet
from megatron_fspo.mcore.model.model import named_weights
from megatron_fspo.weights import Adapters, Architecture, shard_shape
from megatron_fspo.weights.table import adapter_rows

LINEAR = {
    "self_attention.linear_qkv": ("q", "k", "v"),
    "self_attention.linear_proj": ("o",),
    "mlp.linear_fc1": ("gate", "up"),
    "mlp.linear_fc2": ("down",),
}
"""Linear layer of a transformer layer → its LoRA targets, in the order of its outputs."""
_MARK = ".adapters."


def is_adapter(name: str) -> bool:
    """Return True if a parameter's Megatron name is that of an adapter factor."""
    return _MARK in name


def install_adapters(chunk: GPTModel, arch: Architecture, group: dist.ProcessGroup) -> None:
    """Freeze a model chunk and add adapters to its linear layers; their values are NaN until filled."""
    adapters = arch.adapters
    assert adapters is not None
    chunk.requires_grad_(False)
    for layer in chunk.decoder.layers:
        for name, targets in LINEAR.items():
            linear = name.startswith("self_attention.") and isinstance(layer.self_attention, GatedDeltaNet)
            if not linear and not set(targets).isdisjoint(adapters.targets):
                _install(layer.get_submodule(name), targets, arch, group)
    if chunk.pre_process:
        # Recomputed layers get no gradient unless an input requires one.
        chunk.embedding.register_forward_hook(_want_gradient)


def _want_gradient(_: Module, __: Any, output: Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_()


def _install(module: Module, targets: tuple[str, ...], arch: Architecture, group: dist.ProcessGroup) -> None:
    config, weight = module.config, module.weight
    assert isinstance(config, TransformerConfig) and isinstance(weight, Tensor)
    factors: dict[str, dict[str, Parameter]] = {}
    for row in adapter_rows(arch):
        target, factor = row.megatron[0].split(".")[-2:]
        if target in targets:
            one = Parameter(weight.new_full(shard_shape(row, arch, group.size(), 0), math.nan))
            marks = {"sequence_parallel": config.sequence_parallel}
            if row.layout != "replicated":
                marks = {"tensor_model_parallel": group.size() > 1, "partition_dim": int(row.layout == "row")}
                marks["partition_stride"] = 1
            vars(one).update(allreduce=True, **marks)
            factors.setdefault(target, {})[factor] = one
    found = {target: ParameterDict(factors[target]) for target in targets if target in factors}
    module.adapters = ModuleDict(found)
    vars(module)["adapters_on"] = True
    if hasattr(module, "return_layernorm_output"):  # Transformer Engine's norm and product in one
        vars(module)["return_layernorm_output"] = True
    add = _add_column if len(targets) > 1 else _add_row
    module.register_forward_hook(partial(add, arch=arch, group=group))


def _add_column(
    module: Module, args: Any, output: Any, *, arch: Architecture, group: dist.ProcessGroup
) -> Any:
    (product, bias), (x, *_) = output, args
    if isinstance(product, tuple):
        product, x = product
    if not module.adapters_on:
        return product, bias
    factors, adapters = _factors(module), _adapters(arch)
    low = _product(x, torch.cat([factor["a"] for factor in factors.values()]))
    if module.sequence_parallel:  # not while the model samples
        low = mappings.gather_from_sequence_parallel_region(low, group=group)
    else:
        low = mappings.copy_to_tensor_model_parallel_region(low, group=group)
    parts = zip(factors.items(), low.split(adapters.rank, dim=-1), strict=True)
    sums = {target: _product(part, factor["b"]) for (target, factor), part in parts}
    return product + adapters.scale * _in_order(sums, arch, product.shape[-1]), bias


def _add_row(module: Module, args: Any, output: Any, *, arch: Architecture, group: dist.ProcessGroup) -> Any:
    (product, bias), (x, *_) = output, args
    if not module.adapters_on:
        return output
    (factors,) = _factors(module).values()
    low = _product(x, factors["a"])
    if module.sequence_parallel:
        low = mappings.reduce_scatter_to_sequence_parallel_region(low, group=group)
    else:
        low = mappings.reduce_from_tensor_model_parallel_region(low, group=group)
    return product + _adapters(arch).scale * _product(low, factors["b"]), bias


@contextmanager
def without_adapters(chunks: Iterable[Module]) -> Iterator[None]:
    """Context manager: the model computes without its adapters."""
    modules = [layer for chunk in chunks for layer in chunk.modules() if hasattr(layer, "adapters_on")]
    for module in modules:
        vars(module)["adapters_on"] = False
    try:
        yield
    finally:
        for module in modules:
            vars(module)["adapters_on"] = True


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Return [..., inputs] → [..., outputs]. Flattens to two dimensions: with three, torch's kernels differ
    with and without autograd, and S would not be exactly 0 before the first update."""
    return F.linear(x.flatten(0, -2), weight).view(*x.shape[:-1], len(weight))


def _in_order(sums: Mapping[str, Tensor], arch: Architecture, width: int) -> Tensor:
    """Arrange this rank's outputs of the targets in the layer's order, [..., width]; 0 for outputs without an
    adapter."""
    some = next(iter(sums.values()))
    if sums.keys() <= {"gate", "up"}:
        widths, blocks = {"gate": width // 2, "up": width // 2}, 1
    else:  # per query group: query heads, key head, value head
        widths = {"q": arch.q_rows // arch.num_kv_heads, "k": arch.head_dim, "v": arch.head_dim}
        blocks = width // sum(widths.values())
    lead = some.shape[:-1]
    parts = [
        sums[target].view(*lead, blocks, size) if target in sums else some.new_zeros(*lead, blocks, size)
        for target, size in widths.items()
    ]
    return torch.cat(parts, dim=-1).flatten(-2)


def _factors(module: Module) -> dict[str, Mapping[str, Tensor]]:
    return dict(module.adapters.items())  # type: ignore[operator, union-attr]


def _adapters(arch: Architecture) -> Adapters:
    assert arch.adapters is not None
    return arch.adapters


def first_values(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the start of an unsliced factor, float32: A uniform within ±1/√inputs as in PEFT, B = 0. The
    same in every layout."""
    if name.endswith("lora_B.weight"):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.empty(shape).uniform_(-1.0, 1.0, generator=generator) / math.sqrt(shape[1])


@torch.no_grad()
def merged_parameters(chunk: GPTModel, arch: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each base parameter with adapters merged: added in float32, rounded once."""
    modules = dict(chunk.named_modules()) if arch.adapters else {}
    for name, parameter in named_weights(chunk):
        if is_adapter(name):
            continue
        path, _, kind = name.rpartition(".")
        if kind == "weight" and hasattr(modules.get(path), "adapters"):
            yield name, _merged(modules[path], parameter, arch)
        else:
            yield name, parameter


@torch.no_grad()
def share_lost_by_merging(chunks: Iterable[Module], arch: Architecture) -> float:
    """Return the error of :func:`merged_parameters`: norm of the error over norm of what the adapters
    add; 0 if they add nothing. Collective over the job."""
    chunks = list(chunks)
    sums = torch.zeros(2, dtype=torch.float64, device=next(chunks[0].parameters()).device)
    for module in (layer for chunk in chunks for layer in chunk.modules() if hasattr(layer, "adapters_on")):
        weight: Tensor = module.weight  # type: ignore[assignment]
        added = _added(module, weight, arch)
        lost = added - (_merged(module, weight, arch).to(added.dtype) - weight.to(added.dtype))
        sums += torch.stack([lost.norm(), added.norm()]).double() ** 2
    dist.all_reduce(sums)
    squares = sums.tolist()
    return math.sqrt(squares[0] / squares[1]) if squares[1] else 0.0


def _merged(module: Module, weight: Tensor, arch: Architecture) -> Tensor:
    added = _added(module, weight, arch)
    return (weight.to(added.dtype) + added).to(weight.dtype)


def _added(module: Module, weight: Tensor, arch: Architecture) -> Tensor:
    """Return what a layer's adapters add to its weight, in float32, or float64 for a float64 weight."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    sums = {target: (one["b"].to(wide) @ one["a"].to(wide)).t() for target, one in _factors(module).items()}
    first = next(iter(sums.values()))
    cut = not sums.keys().isdisjoint({"o", "down"})
    whole = first if cut else _in_order(sums, arch, weight.shape[0])
    return _adapters(arch).scale * whole.t()
