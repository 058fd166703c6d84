"""The policy: a Megatron ``GPTModel`` from a Hugging Face architecture."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fspo.mcore.backend import Backend
from megatron_fspo.weights import Architecture


def padded_vocab_size(vocab_size: int, tensor: int) -> int:
    """The vocabulary padded so that every tensor-parallel rank holds the same number of rows."""
    return math.ceil(vocab_size / tensor) * tensor


def transformer_config(
    arch: Architecture, backend: Backend, *, tensor: int, sequence: bool, dtype: torch.dtype
) -> TransformerConfig:
    """Megatron's view of the architecture."""
    return TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.ffn_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=arch.rms_norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        tensor_model_parallel_size=tensor,
        sequence_parallel=sequence,
        # Packed micro-batches differ in length; Megatron ties this to the dispatcher even without experts.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # The contract of mcore/normalise.py.
        calculate_per_token_loss=True,
        **backend.config_flags(),
    )


def build_model(arch: Architecture, config: TransformerConfig, backend: Backend) -> GPTModel:
    """A bare model with random weights: load a checkpoint into it next."""
    model = GPTModel(
        config=config,
        transformer_layer_spec=backend.layer_spec(config),
        vocab_size=padded_vocab_size(arch.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=arch.max_position_embeddings,
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="rope",
        rotary_base=int(arch.rope_theta),
    )
    return model.to(backend.device)


def wrap_for_training(model: GPTModel, config: TransformerConfig) -> DistributedDataParallel:
    """Add gradient buffers in fp32 and the data-parallel reduction."""
    wrapped = Float16Module(config, model) if config.bf16 else model
    ddp = DistributedDataParallel(
        config,
        # Megatron's NaN check would raise on one rank and leave the others waiting: policy.py looks at the
        # reduced gradient norm, which is the same everywhere.
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, check_for_nan_in_grad=False),
        wrapped,
    )
    config.finalize_model_grads_func = finalize_model_grads
    return ddp
