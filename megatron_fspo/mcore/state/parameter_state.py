"""Where each parameter of this rank, and its optimizer state, belongs in the whole model; for checkpoints.

Megatron maps a parameter to a global tensor that does not depend on the layout. On a rank, the parameter
consists of one or two blocks of that tensor (two for gate and up). The optimizer holds all of the parameter's
values or, if distributed, a contiguous range.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor
from torch.nn import Parameter

from megatron_fspo.mcore.model.lora import is_adapter
from megatron_fspo.mcore.model.model import is_expert, layer_offset, named_weights
from megatron_fspo.mcore.model.policy import Policy
from megatron_fspo.weights import resolve, shard_slices

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A contiguous range of a parameter's values that is one box of the global tensor."""

    key: str
    shape: tuple[int, ...]
    """Shape of the global tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    """One per dimension of the global tensor; 1 in the dimension of layers."""
    start: int
    """Index of the block's first value among the parameter's."""
    padded: bool
    """The global tensor has padding rows that depend on the layout, as the vocabulary has."""
    first_copy: bool
    """False if another tensor-parallel rank or pipeline stage has the first copy."""

    @property
    def end(self) -> int:
        return self.start + math.prod(self.sizes)


@dataclass(frozen=True, kw_only=True)
class ParameterState:
    """A parameter, and the range ``first`` to ``end`` of its values that this rank's optimizer holds."""

    parameter: Tensor
    """Or a buffer, which no optimizer updates."""
    blocks: list[Block]
    main: Tensor
    """[end - first] values that the optimizer updates: the fp32 copy, or the parameter's own memory."""
    moments: dict[str, Tensor]
    """Adam's moments, each [end - first]; empty before the first step."""
    first: int
    own: range
    """The values within ``first`` to ``end`` that this rank, and no other with a copy, writes."""

    @property
    def end(self) -> int:
        return self.first + self.main.numel()

    @property
    def has_main_copy(self) -> bool:
        """True if ``main`` is a copy in another dtype."""
        return self.main.dtype != self.parameter.dtype


def parameter_states(policy: Policy) -> Iterator[ParameterState]:
    """Yield the state of every trained parameter of this rank and, without adapters, of every buffer."""
    held, shares = _held(policy), {} if policy.parallel.distributed_optimizer else _shares(policy)
    first_copy = policy.groups.copies(expert=False).rank() == 0
    for chunk in policy.chunks:
        described = chunk.sharded_state_dict()
        for name, parameter in named_weights(chunk):
            buffer = policy.arch.adapters is None and not isinstance(parameter, Parameter)
            if not (parameter.requires_grad or buffer):
                continue
            main, first = torch.empty(0, device=parameter.device), 0
            state: dict[str, Tensor] = {}
            if parameter in held:
                main, first = held[parameter].main, held[parameter].first
                state = held[parameter].inner.state.get(main, {})
            elif buffer:
                main = parameter if first_copy else main
            yield ParameterState(
                parameter=parameter,
                blocks=(
                    [_adapter_block(policy, chunk, name, parameter)]
                    if is_adapter(name)
                    else list(_blocks(described[name], parameter))
                ),
                main=main.detach().view(-1),
                moments={name: state[name].detach().view(-1) for name in MOMENTS if name in state},
                first=first,
                own=shares.get(parameter, range(first, first + main.numel())),
            )


def _shares(policy: Policy) -> dict[Tensor, range]:
    """Return the range of each parameter that this rank writes without a distributed optimizer: ranks with
    copies write equal, contiguous shares of all experts' parameters, and of all others."""
    shares: dict[Tensor, range] = {}
    for expert in (False, True):
        group, passed = policy.groups.copies(expert=expert), 0
        named = [pair for chunk in policy.chunks for pair in chunk.named_parameters()]
        some = [p for name, p in named if is_expert(name) == expert and p.requires_grad]
        total = sum(parameter.numel() for parameter in some)
        start, stop = (total * rank // group.size() for rank in (group.rank(), group.rank() + 1))
        for parameter in some:
            shares[parameter] = range(max(0, start - passed), min(parameter.numel(), stop - passed))
            passed += parameter.numel()
    return shares


def prepare_optimizer(policy: Policy, steps: int) -> None:
    """Create missing moments (0) in the optimizer, for loading, and set its number of steps: per parameter in
    torch's Adam, per parameter group in that of Transformer Engine or apex."""
    for held in _held(policy).values():
        inner, state = held.inner, held.inner.state[held.main]
        for name in MOMENTS:
            if name not in state:
                state[name] = torch.zeros_like(held.main, requires_grad=False)
        if isinstance(inner, torch.optim.Adam):
            state["step"] = torch.tensor(float(steps))
        else:
            for group in inner.param_groups:
                group["step"] = steps


def extra_states(policy: Policy) -> Iterator[str]:
    """Yield the names of this rank's extra states, without copies, which Megatron's loader requires."""
    for chunk in policy.chunks:
        for item in chunk.sharded_state_dict().values():
            if isinstance(item, ShardedObject) and not any(_as_tuple(item.replica_id)):
                yield item.unique_key


def _blocks(item: ShardedTensor | ShardedTensorFactory, parameter: Tensor) -> Iterator[Block]:
    for shard in item.build() if isinstance(item, ShardedTensorFactory) else [item]:
        *copies, _ = _as_tuple(shard.replica_id)  # the last is the data-parallel rank
        yield Block(
            key=shard.key,
            shape=tuple(shard.global_shape),
            offsets=tuple(shard.global_offset),
            sizes=(*(1 for _ in range(shard.prepend_axis_num)), *shard.local_shape),
            start=(shard.data.data_ptr() - parameter.data_ptr()) // parameter.itemsize,
            padded=shard.allow_shape_mismatch,
            first_copy=not any(copies),
        )


def _adapter_block(policy: Policy, chunk: GPTModel, name: str, parameter: Tensor) -> Block:
    """Return the block of an adapter factor, which Megatron cannot map: one box of a tensor of all layers."""
    group, arch, offset = policy.groups.tp, policy.arch, layer_offset(policy.config, chunk)
    row = resolve(name, arch, offset)
    (part,) = shard_slices(row, arch, group.rank(), group.size(), policy.padded_vocab)
    layer = int(name.split("layers.")[1].partition(".")[0]) + offset
    return Block(
        key=row.key,
        shape=(arch.num_layers, *row.hf[0].shape(arch)),
        offsets=(layer, *(span.start for span in part)),
        sizes=(1, *parameter.shape),
        start=0,
        padded=False,
        first_copy=row.layout != "replicated" or group.rank() == 0,
    )


def _as_tuple(replica_id: int | tuple[int, ...]) -> tuple[int, ...]:
    return replica_id if isinstance(replica_id, tuple) else (replica_id,)


@dataclass(frozen=True)
class _Held:
    inner: torch.optim.Optimizer
    main: Tensor
    first: int = 0


def _held(policy: Policy) -> dict[Tensor, _Held]:
    """Map each parameter of which the optimizer holds values to the tensor that the optimizer updates."""
    held: dict[Tensor, _Held] = {}
    optimizer = policy.optimizer
    for each in optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]:
        inner = each.optimizer
        if isinstance(each, DistributedOptimizer):
            for parameter, (group, order) in each.model_param_group_index_map.items():
                first = each._get_model_param_range_map(parameter)["param"].start
                held[parameter] = _Held(inner, inner.param_groups[group]["params"][order], first)
        elif isinstance(each, Float16OptimizerWithFloat16Params):
            models = [parameter for group in each.float16_groups for parameter in group]
            mains = [main for group in each.fp32_from_float16_groups for main in group]
            held |= {model: _Held(inner, main) for model, main in zip(models, mains, strict=True)}
        else:
            held |= {model: _Held(inner, model) for group in inner.param_groups for model in group["params"]}
    return held
