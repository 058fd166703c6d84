"""Megatron's layer spec, and norm and attention for it that run on any device.

Shapes: h heads, g KV heads, d head size, t tokens of a packed micro-batch on this rank (1 / cp of them under
context parallelism).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from megatron_fspo.mcore.machine.backend import Backend
from megatron_fspo.mcore.model.gated_delta import GatedDeltaNet, GatedSelfAttention
from megatron_fspo.mcore.model.packed_attention import attend, layer_window, make_sinks, packed_attention
from megatron_fspo.mcore.model.policy_loss import at_positions
from megatron_fspo.mcore.model.self_attention import LayerSelfAttention, SplitByHeads, has_ropes
from megatron_fspo.packing.zigzag import gathered_positions, local_positions
from megatron_fspo.weights import Architecture, has_parameter

if importlib.util.find_spec("transformer_engine") is None:
    # megatron-core 0.16 takes mocks for Transformer Engine's classes; 0.19 does not import this linear layer.
    vars(multi_latent_attention).update(HAVE_TE=False, Linear=Linear)


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose gradient Megatron sums over tensor-parallel ranks under sequence parallelism. It
    multiplies by its weight, or by 1 + weight (Gemma)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # finalize_model_grads reads this attribute; each rank sees only its slice of the tokens.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        if not self._zero_centered:
            return super().forward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return F.rms_norm(wide, self.normalized_shape, 1 + self.weight.to(wide.dtype), self.eps).to(x.dtype)


class SDPACoreAttention(SplitByHeads, MegatronModule):  # type: ignore[misc, unused-ignore]
    """Causal attention in torch; packed sequences do not attend to one another.

    Megatron's ``DotProductAttention`` supports neither packed inputs nor context parallelism, and stores all
    scores. Under context parallelism each rank gathers all keys and values (one all-gather in forward, one
    reduce-scatter in backward). Meant for CPU runs and as a reference: on GPUs, Transformer Engine's ring
    attention saves memory. Not supported: dropout, unpacked inputs.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self._window = layer_window(config, layer_number)
        assert pg_collection is not None
        self._cp, self._group = pg_collection.cp, pg_collection.tp
        self.softmax_offset = make_sinks(config)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend: query [t, h, d], key [t, g, d], value [t, g, v] → [t, h·v]. ``attention_mask`` and
        ``attention_bias`` must be None. ``packed_seq_params`` has the borders of the sequences, over all
        context-parallel ranks, and optionally the micro-batch, with the prefixes that sequences share."""
        assert attention_mask is None and attention_bias is None and packed_seq_params is not None
        batch = getattr(packed_seq_params, "batch", None)
        borders = (packed_seq_params.cu_seqlens_q if batch is None else batch.on_host.borders).tolist()
        if self._cp.size() > 1:
            return self._attend_zigzag(query, key, value, borders)
        prefixes = () if batch is None else batch.prefixes
        how: Any = {"scale": self.softmax_scale, "window": self._window, "sinks": self.softmax_offset}
        return packed_attention(query, key, value, borders, prefixes, **how).flatten(1)

    def _attend_zigzag(self, query: Tensor, key: Tensor, value: Tensor, borders: list[int]) -> Tensor:
        """Attend with this rank's queries to the keys of all ranks, sequence by sequence. → [t, h·d]"""
        size, width = self._cp.size(), value.shape[-1]
        value = F.pad(value, (0, key.shape[-1] - width))
        order, mine = (x.to(query.device) for x in _zigzag(tuple(borders), self._cp.rank(), size))
        both = gather_from_sequence_parallel_region(torch.stack([key, value], 1), group=self._cp)
        # Gathered rows are in rank order; restore the order of the sequences.
        key, value = both[order].unbind(1)
        lengths = [end - first for first, end in pairwise(borders)]
        shares = [length // size for length in lengths]
        parts = []
        rows = zip(_split(shares, query, mine), _split(lengths, key, value), pairwise(borders), strict=True)
        for (q, places), (k, v), (first, end) in rows:
            ahead = places[:, None] - torch.arange(first, end, device=query.device)
            seen = (ahead >= 0) & (ahead < (self._window or end))
            # Add a batch dimension: with three dimensions torch uses its slowest kernel.
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            parts.append(attend(q, k, v, seen, self.softmax_scale, self.softmax_offset)[0].transpose(0, 1))
        return torch.cat(parts)[..., :width].flatten(1)


def _split(lengths: list[int], *tokens: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split every tensor into its sequences. Not by slices: in backward each slice allocates a gradient as
    large as the whole tensor."""
    return zip(*(torch.split(x, lengths) for x in tokens), strict=True)


@lru_cache(maxsize=4)
def _zigzag(borders: tuple[int, ...], rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Return positions of the whole row's tokens after a gather, and of this rank's tokens in the row. Cached
    for the other layers of the micro-batch."""
    whole = torch.tensor(borders)
    return gathered_positions(whole, size), local_positions(whole, rank, size)


class LatentSelfAttention(MLASelfAttention):  # type: ignore[misc, unused-ignore]
    """Megatron's latent attention, which has RoPE angles of its own, for packs with shared prompts."""

    def _resolve_qk_norm_config(self, submodules: Any) -> Any:
        # megatron-core 0.19 would add a norm to a query that is projected directly, which no model has.
        return vars(submodules)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        """Compute query, key and value, and what Megatron returns with them. Called again for a layer that is
        recomputed."""
        batch = getattr(packed_seq_params, "batch", None)
        with ExitStack() as stack:
            if batch is not None and batch.prefixes:
                hook = partial(at_positions, positions=batch.row_positions)
                stack.enter_context(self.rotary_pos_emb.register_forward_hook(hook))
            out: tuple[Tensor, ...] = super().get_query_key_value_tensors(
                hidden_states, key_value_states, position_ids, packed_seq_params, **options
            )
        return out


class ResidualAdd(torch.nn.Module):
    """Adds what attention or MLP return to the residual stream: after a norm (GLM-4), or times a factor
    (Granite). In the place of Megatron's ``get_bias_dropout_add``."""

    def __init__(self, config: TransformerConfig, scale: float, norm: type[torch.nn.Module] | None) -> None:
        super().__init__()
        self._scale = scale
        self.norm: Callable[[Tensor], Tensor] | None = None
        if norm is not None:
            self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        return self._add

    def _add(self, output_with_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
        output, _ = output_with_bias
        return residual + (output if self.norm is None else self.norm(output)) * self._scale


def block_spec(
    backend: Backend, config: TransformerConfig, vp_stage: int | None = None, arch: Architecture | None = None
) -> TransformerBlockSubmodules:
    """Return Megatron's specs of this rank's layers: of Transformer Engine's with our attention, or of
    Megatron's local ones with our norm and attention. ``vp_stage`` is the virtual pipeline stage; ``arch``
    adds what the configuration lacks, such as other layers and norms."""
    first, pattern = get_transformer_layer_offset(config, vp_stage), config.moe_layer_freq
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    experts = [config.num_moe_experts if pattern == 1 or pattern[n] else None for n in numbers]
    each = [
        *zip(experts, (arch is not None and arch.layer_type(n) == "linear" for n in numbers), strict=True)
    ]
    kinds = {kind: _layer_spec(arch, backend, config, *kind) for kind in {*each}}
    layers = [kinds[kind] for kind in each]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=_norm(backend))


def _norm(backend: Backend) -> type[torch.nn.Module]:
    """Return the class of norms that are no part of a linear layer."""
    if backend.layers != "transformer_engine":
        return RMSNorm
    from megatron.core.extensions.transformer_engine import TENorm

    norm: type[torch.nn.Module] = TENorm
    return norm


def _remove_norms(backend: Backend, layer: ModuleSpec) -> None:
    """Take the norms before attention and MLP out of a spec."""
    if backend.layers != "transformer_engine":
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = IdentityOp
        return
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

    mlp = layer.submodules.mlp  # a function in megatron-core 0.19
    inside = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
    inside.linear_fc1 = layer.submodules.self_attention.submodules.linear_qkv = TEColumnParallelLinear


def _gate(layer: ModuleSpec, arch: Architecture, linear: bool) -> None:
    """Put gated attention, or a gated delta net, into a spec."""
    attention = layer.submodules.self_attention
    if not linear:
        attention.module = GatedSelfAttention
        return
    parts = {"in_proj": attention.submodules.linear_qkv, "out_proj": attention.submodules.linear_proj}
    layer.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, params={"arch": arch, **parts})
    layer.submodules.sharded_state_dict_keys_map["input_layernorm."] = "self_attention.in_proj.layer_norm_"


def _layer_spec(
    arch: Architecture | None,
    backend: Backend,
    config: TransformerConfig,
    num_experts: int | None,
    linear: bool,
) -> ModuleSpec:
    latent = config.multi_latent_attention
    both = {"num_experts": num_experts, "qk_layernorm": config.qk_layernorm, "multi_latent_attention": latent}
    if backend.layers == "transformer_engine":
        from megatron_fspo.mcore.model.te_attention import SharingAttention

        grouped = num_experts is not None and config.moe_grouped_gemm
        layer = get_gpt_layer_with_transformer_engine_spec(moe_grouped_gemm=grouped, **both)
        layer.submodules.self_attention.submodules.core_attention = SharingAttention
    else:
        layer = get_gpt_layer_local_spec(normalization=config.normalization, **both)
        layer.submodules.input_layernorm = RMSNorm
        layer.submodules.pre_mlp_layernorm = RMSNorm
        if latent:
            layer.submodules.sharded_state_dict_keys_map = {
                "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
                "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            }
        if num_experts:
            # Checkpoints name norms as in Transformer Engine, which fuses this one into an MLP but not into
            # experts; the local spec renames it for both.
            del layer.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
            # The router of megatron-core 0.16.1 reads this name even if it was never imported.
            vars(moe_utils).setdefault("te_general_gemm", None)
        attention = layer.submodules.self_attention.submodules
        if latent:
            attention.q_layernorm = RMSNorm if config.q_lora_rank else IdentityOp
            attention.kv_layernorm = RMSNorm
            # As with Transformer Engine. Sharded, they would lose part of the rotated key's gradient.
            attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
        elif config.qk_layernorm:
            attention.q_layernorm = RMSNorm
            attention.k_layernorm = RMSNorm
        attention.core_attention = SDPACoreAttention
    if latent:
        layer.submodules.self_attention.module = LatentSelfAttention
    if arch is None:
        return layer
    if arch.projection_norms or has_ropes(arch):
        layer.submodules.self_attention.module = LayerSelfAttention
        layer.submodules.self_attention.params |= {"arch": arch}
    if not has_parameter(arch, "input_layernorm.weight"):
        _remove_norms(backend, layer)
    if arch.output_gate:
        _gate(layer, arch, linear)
    for place in ("self_attn_bda", "mlp_bda"):
        normed, scale = has_parameter(arch, f"{place}.norm.weight"), arch.residual_scale
        if normed or scale != 1:
            how = {"config": config, "scale": scale, "norm": _norm(backend) if normed else None}
            setattr(layer.submodules, place, ModuleSpec(module=ResidualAdd, params=how))
    return layer
