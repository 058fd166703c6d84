"""The policy: Megatron ``GPTModel`` chunks from a Hugging Face architecture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.nn import Module

from megatron_fspo.config import Parallel
from megatron_fspo.config.fp8 import BF16, FP8
from megatron_fspo.errors import InputError
from megatron_fspo.mcore.machine.backend import Backend
from megatron_fspo.mcore.machine.sizes import padded_vocab_size
from megatron_fspo.mcore.model.layers import block_spec
from megatron_fspo.mcore.model.packed_attention import SINK
from megatron_fspo.mcore.model.router import install_routers
from megatron_fspo.mcore.model.self_attention import Ropes, has_ropes
from megatron_fspo.weights import Architecture, has_parameter


def transformer_config(
    arch: Architecture,
    backend: Backend,
    *,
    parallel: Parallel,
    dtype: torch.dtype,
    recompute: bool = False,
    fp8: FP8 = BF16,
) -> TransformerConfig:
    """Build Megatron's configuration of the model."""
    interleaved = parallel.virtual_pipeline > 1
    if arch.window and parallel.context > 1 and backend.layers == "transformer_engine":
        raise InputError(f"parallel.context = {parallel.context}: Transformer Engine's rings have no window")
    return (MLATransformerConfig if arch.latent else TransformerConfig)(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.ffn_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        normalization="RMSNorm",
        layernorm_epsilon=arch.rms_norm_eps,
        add_qkv_bias=has_parameter(arch, "self_attention.linear_qkv.bias"),
        softmax_scale=arch.attention_scale,
        window_size=None if arch.window is None else (arch.window - 1, 0),
        window_attn_skip_freq=[int(arch.layer_type(n) == "window") for n in range(arch.num_layers)],
        layernorm_zero_centered_gamma=arch.zero_centered_norms,
        rotary_interleaved=arch.rotary_interleaved,
        gated_linear_unit=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        tensor_model_parallel_size=parallel.tensor,
        sequence_parallel=parallel.sequence,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if interleaved else None,
        # Between two stages with several chunks each, batched sends and receives are matched wrongly:
        # gradients are silently wrong, or the job hangs.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        # Packed micro-batches differ in length, which needs this dispatcher, even without experts.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # mcore/normalise.py relies on this.
        calculate_per_token_loss=True,
        init_method=_unset,
        output_layer_init_method=_unset,
        **_experts(arch, backend, dtype),
        **_precision(fp8),
        **(backend.config_flags() | _attention(arch) | _linear(arch, backend)),
    )


def _unset(weight: Tensor) -> None:
    """Megatron's ``init_method``: fill with NaN, so that a weight which no checkpoint fills is noticed.

    With ``perform_initialization=False`` Megatron's local layers would not mark their weights
    ``tensor_model_parallel``, and the gradient norm would omit all shards but the first.
    """
    torch.nn.init.constant_(weight, math.nan)


def _attention(arch: Architecture) -> dict[str, Any]:
    """Return the settings for heads."""
    latent = arch.latent
    # Megatron's fused RoPE of packs ignores that neighbours are rotated; that of latent attention needs YaRN.
    unfused = latent or arch.rotary_interleaved
    settings: dict[str, Any] = {"apply_rope_fusion": False} if unfused else {}
    if latent is None:
        normed = has_parameter(arch, "self_attention.q_layernorm.weight") and not arch.projection_norms
        if arch.linear:  # which makes the layers of a checkpoint separate
            settings["linear_attention_freq"] = [
                int(arch.layer_type(n) == "linear") for n in range(arch.num_layers)
            ]
        return {
            "kv_channels": arch.head_dim,
            "qk_layernorm": normed,
            "softmax_type": "learnable" if has_parameter(arch, SINK) else "vanilla",
            "attention_output_gate": arch.output_gate,
            **settings,
        }
    yarn = {**vars(arch.yarn)} if arch.yarn else {}
    yarn.pop("correction_range_round_to_int", None)
    return {
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": arch.head_dim - latent.rope_size,
        "qk_pos_emb_head_dim": latent.rope_size,
        "v_head_dim": latent.value_size,
        "qk_layernorm": True,
        "rope_type": "yarn" if arch.yarn else "rope",
        "rotary_base": int(arch.rope_theta),
        **settings,
        **yarn,
    }


def _linear(arch: Architecture, backend: Backend) -> dict[str, Any]:
    """Return the settings for the activation, and for biases of all linear layers."""
    limit = arch.experts.clamp if arch.experts else None
    if limit is None:
        gate: Any = F.silu
        if arch.gelu:  # Megatron's fused product takes the erf form as sign for tanh
            fused = backend.config_flags()["bias_activation_fusion"]
            gate = F.gelu if fused else partial(F.gelu, approximate="tanh")
        return {"activation_func": gate, "add_bias_linear": False}
    # With biases, Megatron refuses the fused addition to the residual stream.
    clamped = {"activation_func_clamp_value": limit, "glu_linear_offset": 1.0, "bias_dropout_fusion": False}
    return {"activation_func": quick_gelu, "add_bias_linear": True, **clamped}


def _experts(arch: Architecture, backend: Backend, dtype: torch.dtype) -> dict[str, Any]:
    """Return the settings for router and experts; empty for a dense model."""
    if arch.experts is None:
        return {}
    layers = range(arch.num_layers)
    return {
        "num_moe_experts": arch.experts.count,
        "moe_layer_freq": 1 if arch.uniform else [int(layer >= arch.dense_layers) for layer in layers],
        "moe_shared_expert_intermediate_size": arch.shared_ffn_size or None,
        "moe_shared_expert_gate": has_parameter(arch, "mlp.shared_experts.gate_weight"),
        # The sigmoid's logits have at least 32 bits, as in transformers.
        "moe_router_dtype": ("fp64" if dtype == torch.float64 else "fp32") if arch.experts.sigmoid else None,
        "moe_ffn_hidden_size": arch.experts.ffn_size,
        "moe_router_topk": arch.experts.per_token,
        # transformers computes the softmax over all experts, then selects the top k. If it renormalizes
        # these, that equals a softmax over the top k only, which is Megatron's other order.
        "moe_router_pre_softmax": not arch.experts.normalize_top_k,
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": backend.layers == "transformer_engine",
    }


def _precision(fp8: FP8) -> dict[str, Any]:
    """Return the settings for products in FP8; empty without."""
    if fp8.recipe == "none":
        return {}
    return {
        "fp8": fp8.format,
        "fp8_recipe": fp8.recipe,
        "first_last_layers_bf16": fp8.first_last_layers_bf16 > 0,
        "num_layers_at_start_in_bf16": fp8.first_last_layers_bf16,
        "num_layers_at_end_in_bf16": fp8.first_last_layers_bf16,
    }


def build_chunks(arch: Architecture, config: TransformerConfig, backend: Backend) -> list[GPTModel]:
    """Build this rank's model chunks, one per virtual pipeline stage. Matrices are NaN until a checkpoint is
    loaded; no random numbers are drawn. 0.19 calls the class deprecated, but 0.16 lacks ``HybridModel``."""
    stages = config.virtual_pipeline_model_parallel_size
    chunks = []
    for vp_stage in [None] if stages is None else range(stages):
        model = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(backend, config, vp_stage, arch),
            vocab_size=padded_vocab_size(arch.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=arch.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            parallel_output=True,
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type="rope",
            rotary_percent=arch.rotary_share,
            rotary_base=int(arch.rope_theta),
            seq_len_interpolation_factor=arch.rope_divisor if arch.rope_divisor != 1 else None,
            rope_scaling=arch.rope_factor is not None,
            rope_scaling_factor=arch.rope_factor or 1.0,
            vp_stage=vp_stage,
        )
        if has_ropes(arch):
            model.rotary_pos_emb = Ropes(arch, model.rotary_pos_emb)
        chunks.append(model.to(backend.device))  # norms and routers are created on the CPU
        if model.pre_process and (scale := arch.embedding_factor(config.params_dtype)) != 1:
            model.embedding.register_forward_hook(lambda *call, scale=scale: call[-1] * scale)
        if model.post_process and arch.logits_divisor != 1:
            norm = model.decoder.final_layernorm
            norm.register_forward_hook(lambda *call: call[-1] / arch.logits_divisor)
        for layer in model.modules():
            if isinstance(layer, RowParallelLinear) and layer.is_expert and layer.bias is not None:
                # Megatron adds the bias in place, which autograd refuses for a view.
                layer.register_forward_hook(lambda *call: (call[-1][0].clone(), call[-1][1]))
    install_routers(chunks, arch.experts)
    return chunks


def named_weights(chunk: Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of all that a checkpoint has of a chunk: parameters, and biases of routers, which
    are not trained."""
    yield from chunk.named_parameters()
    yield from ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias"))


def layer_offset(config: TransformerConfig, chunk: GPTModel) -> int:
    """Return the number of layers of the whole model before this chunk."""
    return int(get_transformer_layer_offset(config, chunk.vp_stage))


def expert_offset(arch: Architecture, group: dist.ProcessGroup) -> int:
    """Return the number of a layer's experts on lower ranks of the expert-parallel group."""
    return group.rank() * arch.num_experts // group.size()


def is_expert(name: str) -> bool:
    """Return True if a parameter's Megatron name is that of an expert's."""
    return ".experts." in name


def wrap_for_training(
    modules: Sequence[Module], config: TransformerConfig, parallel: Parallel
) -> list[DistributedDataParallel]:
    """Wrap this rank's chunks with gradient buffers and the data-parallel reduction, in the order of
    Megatron's schedule; gradients are fp32 (float64 for float64 parameters)."""
    # allreduce=False: reduce gradients over the ranks that hold the same experts. megatron-core 0.16 sets it
    # with expert parallelism only; without, each tensor-parallel rank would keep its own tokens' gradient.
    # tensor_model_parallel=True: no other rank holds the parameter. Else the gradient norm would include
    # Transformer Engine's experts of the first tensor-parallel rank only.
    # sequence_parallel=False: Megatron would sum biases over the ranks, each of which has other experts.
    for module in modules:
        for name, parameter in module.named_parameters():
            if is_expert(name):
                vars(parameter).update(allreduce=False, tensor_model_parallel=True, sequence_parallel=False)
    # Transformer Engine's layers add weight gradients directly to ``main_grad``. Megatron's flag for it would
    # require apex for Megatron's own layers, embedding and head.
    for layer in (layer for module in modules for layer in module.modules()):
        if hasattr(layer, "fuse_wgrad_accumulation"):
            vars(layer)["fuse_wgrad_accumulation"] = True
    wrapped = [
        DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=config.params_dtype != torch.float64,
                # Megatron's NaN check would raise on one rank and leave the others waiting. policy.py checks
                # the reduced gradient norm, which is the same on all ranks.
                check_for_nan_in_grad=False,
                use_distributed_optimizer=parallel.distributed_optimizer,
                overlap_grad_reduce=parallel.overlap_grad_reduce,
            ),
            module,
            # Buckets for the first chunk only, as in Megatron's own training.
            disable_bucketing=number > 0,
        )
        for number, module in enumerate(modules)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    if parallel.overlap_grad_reduce:
        no_sync = [model.no_sync for model in wrapped]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped
