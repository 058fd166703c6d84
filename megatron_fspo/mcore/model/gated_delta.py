"""Gated delta nets (arXiv 2412.06464) and gated softmax attention, for packs and tensor parallelism.

Megatron's own refuses packs or needs a GPU, and leaves the gradient of its norm unsummed over tensor-parallel
ranks without sequence parallelism. The precision of each part is that of transformers: decays, the rule and
the norm are computed in at least 32 bits.

Shapes: s tokens of b sequences (or all t tokens of a pack, with b = 1), h value heads and g key heads of this
rank, c channels of the convolution: queries, keys and values.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_fspo.mcore.model.self_attention import SplitByHeads
from megatron_fspo.weights.architecture import Architecture, LinearAttention

CHUNK = 64
State = tuple[Tensor, Tensor]
"""The last channels [b, c, conv - 1] and the memory [b, h, key size, value size] of a sequence."""


@cache
def kernels() -> str | None:
    """Return the name of the installed kernels for GPUs; None without."""
    found = importlib.util.find_spec("fla") is not None and torch.cuda.is_available()
    return "flash-linear-attention" if found else None


def _wide(x: Tensor) -> Tensor:
    """Return ``x`` in at least 32 bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, memory: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Write and read a memory S, token by token, in chunks: S ← exp(decay) S, then
    S ← S + rate · key ⊗ (value − key·S), which returns query·S.

    query and key [b, s, h, k] are of length 1, value [b, s, h, v], decay and rate [b, s, h], memory
    [b, h, k, v], by default 0 → values [b, s, h, v] and the last memory. All have at least 32 bits.
    """
    tokens = query.shape[1]
    size = min(CHUNK, tokens)
    missing, scale = -tokens % size, query.shape[-1] ** -0.5
    # [b, h, chunks, size, …]; what is missing neither writes nor decays.
    q, k, v, decay, rate = (
        torch.unflatten(F.pad(x.transpose(1, 2), (0, 0, 0, missing)), 2, (-1, size))
        for x in (query * scale, key, value, decay[..., None], rate[..., None])
    )
    decay = decay.cumsum(-2)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    # Of what a token wrote, the share that is left when another one reads.
    left = (decay - decay.mT).masked_fill(later, -torch.inf).exp()
    seen = q @ k.mT * left
    # What tokens of a chunk write depends on what earlier ones wrote: a triangular system.
    inputs = torch.cat([v * rate, k * (rate * decay.exp())], -1)
    solved = torch.linalg.solve_triangular(k * rate @ k.mT * left, inputs, upper=False, unitriangular=True)
    written, forgotten = solved.split([v.shape[-1], k.shape[-1]], -1)
    q, k = q * decay.exp(), k * (decay[..., -1:, :] - decay).exp()
    if memory is None:
        memory = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    found = []
    for i in range(q.shape[2]):
        new = written[:, :, i] - forgotten[:, :, i] @ memory
        found.append(q[:, :, i] @ memory + seen[:, :, i] @ new)
        memory = memory * decay[:, :, i, -1:].exp() + k[:, :, i].mT @ new
    return torch.cat(found, 2)[:, :, :tokens].transpose(1, 2), memory


class DeltaCore(Module):
    """What a gated delta net computes between its linear layers, sequence by sequence."""

    def __init__(self, linear: LinearAttention) -> None:
        super().__init__()
        self.linear = linear

    def forward(
        self, channels: Tensor, weight: Tensor, decay: Tensor, rate: Tensor, packed: PackedSeqParams
    ) -> Tensor:
        """channels [t, 1, c], the convolution's weight [c, 1, conv], decay and rate [t, 1, h] → [t, 1, h, v].
        Nothing passes the borders of ``packed``."""
        batch = getattr(packed, "batch", None)
        borders = packed.cu_seqlens_q if batch is None else batch.borders
        inputs = [x.transpose(0, 1) for x in (channels, decay, rate)]
        if kernels() and channels.is_cuda and channels.element_size() == 2:
            return self._on_gpu(inputs, weight, borders).transpose(0, 1)
        host = borders if batch is None else batch.on_host.borders
        lengths = [end - first for first, end in pairwise(host.tolist())]
        parts = zip(*(torch.split(x, lengths, 1) for x in inputs), strict=True)
        found = [self.sequence(c, d, r, weight)[0] for c, d, r in parts if c.shape[1]]
        return torch.cat(found, 1).transpose(0, 1)

    def sequence(
        self, channels: Tensor, decay: Tensor, rate: Tensor, weight: Tensor, state: State | None = None
    ) -> tuple[Tensor, State]:
        """Continue b sequences of equal length from their state, None at the beginning; [b, s, …]."""
        channels, before = channels.transpose(1, 2), weight.shape[-1] - 1
        past = F.pad(channels, (before, 0)) if state is None else torch.cat([state[0], channels], 2)
        mixed = F.silu(F.conv1d(past, weight, groups=len(weight))).transpose(1, 2)
        q, k, v = (_wide(x) for x in self._heads(mixed))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        found, memory = delta_rule(q, k, v, decay, _wide(rate), None if state is None else state[1])
        return found.to(channels.dtype), (past[..., past.shape[-1] - before :], memory)

    def _heads(self, mixed: Tensor) -> list[Tensor]:
        """[b, s, c] → query and key [b, s, h, k], repeated for the value heads that share them, and value."""
        size, value = self.linear.key_size, self.linear.value_size
        each = self.linear.value_heads // self.linear.key_heads
        groups = torch.unflatten(mixed, -1, (-1, 2 * size + each * value))
        *both, v = torch.split(groups, [size, size, each * value], -1)
        q, k = (x.repeat_interleave(each, 2) for x in both)
        return [q, k, v.reshape(*q.shape[:3], value)]

    def _on_gpu(self, inputs: Sequence[Tensor], weight: Tensor, borders: Tensor) -> Tensor:
        """The same of a whole pack [1, t, …] in Triton kernels."""
        from fla.modules.convolution import causal_conv1d
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        channels, decay, rate = inputs
        mixed = causal_conv1d(channels, weight[:, 0], activation="silu", cu_seqlens=borders)[0]
        q, k, v = self._heads(mixed)
        how: Any = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": borders}
        found: Tensor = chunk_gated_delta_rule(q, k, v, g=decay, beta=rate, **how)[0]
        return found


class CachedDelta(DeltaCore):
    """The core of a decoding session: equally many tokens of each slot continue its sequence."""

    def __init__(self, linear: LinearAttention) -> None:
        super().__init__(linear)
        self._state: State | None = None

    def forward(self, channels: Tensor, weight: Tensor, decay: Tensor, rate: Tensor, packed: None) -> Tensor:
        channels, decay, rate = (x.transpose(0, 1) for x in (channels, decay, rate))
        found, self._state = self.sequence(channels, decay, rate, weight, self._state)
        return found.transpose(0, 1)

    def keep(self, slots: Sequence[int]) -> None:
        """Set the states to these of its slots, in this order."""
        assert self._state is not None
        self._state = (self._state[0][[*slots]], self._state[1][[*slots]])


class GatedNorm(Module):
    """RMSNorm of heads, times silu(gate). Every tensor-parallel rank has other heads: their gradients are
    summed here, with or without sequence parallelism."""

    def __init__(self, config: TransformerConfig, size: int, group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        self.weight = Parameter(torch.ones(size, dtype=config.params_dtype))
        self._eps, self._group = config.layernorm_epsilon, group

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        weight = copy_to_tensor_model_parallel_region(_wide(self.weight), group=self._group)
        normed = F.rms_norm(_wide(x), x.shape[-1:], eps=self._eps).to(x.dtype)
        gated: Tensor = weight.to(x.dtype) * normed * F.silu(_wide(gate))
        return gated.to(x.dtype)


class GatedDeltaNet(SplitByHeads, MegatronModule):  # type: ignore[misc, unused-ignore]
    """A linear layer's attention, in the place of Megatron's ``SelfAttention``. ``in_proj`` and ``out_proj``
    are the classes of its linear layers; with Transformer Engine, ``in_proj`` has the norm before it."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        arch: Architecture,
        in_proj: Any,
        out_proj: Any,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert arch.linear is not None
        linear, self._group = arch.linear, pg_collection.tp
        ranks, self._value_size = self._group.size(), linear.value_size
        self._groups = linear.key_heads // ranks
        each = linear.value_heads // linear.key_heads
        # Of one group: channels, gates, rates of writing, decays.
        self._sizes = [2 * linear.key_size + each * linear.value_size, each * linear.value_size, each, each]
        how: Any = {"config": config, "bias": False, "skip_bias_add": False, "is_expert": False}
        how["tp_group"] = self._group
        self.in_proj = in_proj(
            arch.hidden_size, linear.key_heads * sum(self._sizes), init_method=config.init_method,
            gather_output=False, **how,
        )  # fmt: skip
        shapes: dict[str, tuple[int, ...]] = {"conv_weight": (self._groups * self._sizes[0], 1, linear.conv)}
        shapes |= dict.fromkeys(("A_log", "dt_bias"), (self._groups * each,))
        for name, shape in shapes.items():
            parameter = Parameter(torch.full(shape, torch.nan, dtype=config.params_dtype))
            vars(parameter).update(tensor_model_parallel=True, partition_dim=0, partition_stride=1)
            self.register_parameter(name, parameter)
        self.core_attention = DeltaCore(linear)
        self.out_norm = GatedNorm(config, linear.value_size, self._group)
        self.out_proj = out_proj(
            linear.values, arch.hidden_size, init_method=config.output_layer_init_method,
            input_is_parallel=True, **how,
        )  # fmt: skip

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states [s, b, H], a slice of the tokens under sequence parallelism → the same, and no
        bias."""
        groups = self.in_proj(hidden_states)[0].unflatten(-1, (self._groups, sum(self._sizes)))
        channels, gate, b, a = (x.flatten(2) for x in groups.split(self._sizes, -1))
        decay = -_wide(self.A_log).exp() * F.softplus(_wide(a) + self.dt_bias)
        heads = self.core_attention(channels, self.conv_weight, decay, b.sigmoid(), packed_seq_params)
        gated = self.out_norm(heads, gate.unflatten(-1, (-1, self._value_size)))
        out, bias = self.out_proj(gated.flatten(2))
        return out, bias


class GatedSelfAttention(SelfAttention):  # type: ignore[misc, unused-ignore]
    """Megatron's attention with output gates, in the order of the files: for each head its query and gate."""

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[s, b, H] → query [s, b, heads, d], key and value [s, b, groups, d], gate [s, b, heads, d]."""
        size, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        mixed = self.linear_qkv(hidden_states)[0].unflatten(-1, (groups, -1, size))
        both, key, value = mixed.split([mixed.shape[3] - 2, 1, 1], 3)
        query, gate = both.unflatten(3, (-1, 2)).flatten(2, 3).unbind(3)
        return self.q_layernorm(query), self.k_layernorm(key.squeeze(3)), value.squeeze(3), gate

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate.reshape(x.shape).sigmoid()
