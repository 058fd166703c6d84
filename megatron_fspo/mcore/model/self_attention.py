"""What Megatron's attention lacks: norms over all heads (OLMo), and a RoPE of layers with a window (Gemma 3).

Shapes: h heads of query or key on this rank, d head size.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    YarnRotaryEmbedding,
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_fspo.weights import Architecture


class SplitByHeads:
    """Describes a module for Megatron's checkpoints: its own parameters are split by heads over its group."""

    _group: dist.ProcessGroup

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None, **_: Any
    ) -> dict[str, Any]:
        assert isinstance(self, Module)
        own = dict(self.named_parameters(recurse=False))
        groups = {"tp_group": self._group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own, prefix, dict.fromkeys(own, 0), sharded_offsets, **groups
        )
        for name, module in self.named_children():
            at = f"{prefix}{name}."
            found |= sharded_state_dict_default(module, at, sharded_offsets, metadata, tp_group=self._group)
        return found


class _Normed(torch.autograd.Function):
    """RMS norm over the last two dimensions on all ranks of a group: x [..., h, d] · weight [h·d]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, size: int, group: dist.ProcessGroup
    ) -> Tensor:
        x = x.contiguous()  # as a view of them it would keep query, key and value
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = over_ranks(wide.square().sum((-2, -1), keepdim=True), group)
        scale = torch.rsqrt(squares / size + eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.size, ctx.group = size, group
        return (wide * scale * weight.view(x.shape[-2:])).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        unit = x * scale
        grad = grads[0].to(unit.dtype)
        inner = grad * weight.view(x.shape[-2:])
        mean = over_ranks((inner * unit).sum((-2, -1), keepdim=True), ctx.group) / ctx.size
        slope = (grad * unit).flatten(-2).flatten(0, -2).sum(0)
        return (scale * (inner - unit * mean)).to(x.dtype), slope.to(weight.dtype), None, None, None


def over_ranks(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over the ranks of a group, in place."""
    if group.size() > 1:
        dist.all_reduce(values, group=group)
    return values


class ProjectionNorm(SplitByHeads, Module):
    """RMS norm over all heads of query or key; each tensor-parallel rank has the weights of its heads."""

    def __init__(self, config: TransformerConfig, size: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = Parameter(torch.ones(size // group.size(), dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, group.size() > 1, 0, 1)
        self._eps, self._size, self._group = config.layernorm_epsilon, size, group

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x [..., h, d]."""
        out: Tensor = _Normed.apply(x, self.weight, self._eps, self._size, self._group)  # type: ignore[no-untyped-call]
        return out


class LayerSelfAttention(SelfAttention):  # type: ignore[misc, unused-ignore]
    """Attention with its part of the angles of :class:`Ropes`, and norms over all heads."""

    def __init__(
        self, config: TransformerConfig, *args: Any, layer_number: int, arch: Architecture, **options: Any
    ) -> None:
        two = arch.window_rope_theta is not None
        windowed = two and arch.layer_type(layer_number - 1) == "window"
        if arch.yarn is not None and not windowed:
            config = copy.copy(config)
            yarn = {f"yarn_{name}": value for name, value in vars(arch.yarn).items()}
            if config.apply_rope_fusion:  # without YaRN's factor, of query and of key
                factor = _yarn_get_concentration_factor_from_config(SimpleNamespace(**yarn))
                config.softmax_scale = factor**2 * (config.softmax_scale or arch.head_dim**-0.5)
            else:
                vars(config).update(yarn)
        super().__init__(config, *args, layer_number=layer_number, **options)
        self.softmax_scale = config.softmax_scale  # the decoder reads it
        if arch.projection_norms:
            # Not by the spec: Megatron would sum their gradients over tensor-parallel ranks.
            self.q_layernorm = ProjectionNorm(config, arch.q_size, self.pg_collection.tp)
            self.k_layernorm = ProjectionNorm(config, arch.kv_size, self.pg_collection.tp)
        self._angles = slice(arch.head_dim, None) if windowed else slice(arch.head_dim if two else None)

    def forward(self, *args: Any, rotary_pos_emb: Tensor, **options: Any) -> Any:
        """Attend with this layer's angles; see Megatron's class."""
        angles = rotary_pos_emb[..., self._angles].contiguous()
        return super().forward(*args, rotary_pos_emb=angles, **options)


def has_ropes(arch: Architecture) -> bool:
    """Return True if :class:`Ropes` computes the angles, and layers take theirs."""
    return arch.window_rope_theta is not None or (arch.yarn is not None and arch.latent is None)


class Ropes(Module):
    """RoPE's angles without YaRN's factor, which layers apply; where layers with a window have others, these
    come after: [positions, 1, 1, d or 2·d]."""

    def __init__(self, arch: Architecture, whole: RotaryEmbedding) -> None:
        super().__init__()
        if arch.yarn is not None:
            yarn = {name.removeprefix("rotary_"): value for name, value in vars(arch.yarn).items()}
            whole = YarnRotaryEmbedding(arch.head_dim, rotary_base=arch.rope_theta, **yarn)
        self._parts, self.get_rotary_seq_len = [whole], whole.get_rotary_seq_len
        if arch.window_rope_theta is not None:
            self._parts.append(RotaryEmbedding(arch.head_dim, 1.0, rotary_base=arch.window_rope_theta))

    def forward(self, *args: Any, **options: Any) -> Tensor:
        """Compute the angles; arguments are those of Megatron's classes."""
        found = (part(*args, **options) for part in self._parts)
        return torch.cat([angles[0] if isinstance(angles, tuple) else angles for angles in found], -1)
