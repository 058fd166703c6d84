"""Faults in the head, in attention, and in what happens to gradients after the loss."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.moe import router
from patching import ALONE, CP, DP, EP, MOE, PP, SP, TP, Patch, fault, wrap
from torch import Tensor

from megatron_fspo.mcore.model import layers, lora, packed_attention, policy, policy_loss
from megatron_fspo.mcore.model import router as policy_router
from megatron_fspo.packing import pack as packing
from megatron_fspo.parallel import head
from megatron_fspo.verify.cases import MIXTURE

# Their packages have functions of the same names.
finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
optimizer = importlib.import_module("megatron.core.optimizer.optimizer")

HEAD = (policy_loss, "linear_log_probs")
COMBINE = (head, "_merge")
HIDDEN_GRADIENT = (head, "_hidden_gradient")

# The head.


@fault(SP, "head", *HEAD)
def temperature_ignored(real: Any, *args: Any, **kwargs: Any) -> Any:
    """Log-probs are those of temperature 1"""
    return real(*args, **kwargs | {"temperature": 1.0})


@fault(SP, "head", *HEAD)
def padded_vocabulary(real: Any, *args: Any, vocab_size: int, **kwargs: Any) -> Any:
    """Padding rows of the vocabulary have probability"""
    return real(*args, vocab_size=vocab_size + 1, **kwargs)


@fault(TP, "head", *COMBINE)
def statistics_not_combined(real: Any, table: Tensor) -> Tensor:
    """The softmax covers tensor rank 0's vocabulary only"""
    return real(table[:1])


@fault(SP, "denominator", *COMBINE, figures="actor/entropy", loss="fspo-entropy-kl")
def entropy_not_combined(real: Any, table: Tensor) -> Tensor:
    """The entropy is that of tensor rank 0"""
    top, total, _, target = real(table)
    _, total_here, spread_here, _ = real(table[:1])
    entropy = total_here.log() - spread_here / total_here
    return torch.stack([top, total, total * (total.log() - entropy), target])


@fault(TP, "head-gradient", *HIDDEN_GRADIENT)
def hidden_gradient_not_reduced(
    real: Any, partial: Tensor, rows: Tensor, dtype: torch.dtype, own: Any
) -> Tensor:
    """The hidden-state gradient covers this tensor rank's vocabulary only"""
    return real(partial, rows, dtype, replace(own, group=ALONE))


@fault(SP, "head-gradient", *HIDDEN_GRADIENT)
def hidden_gradient_not_scattered(
    real: Any, partial: Tensor, rows: Tensor, dtype: torch.dtype, own: Any
) -> Tensor:
    """Under sequence parallelism, it is sliced but not summed"""
    full = partial.new_zeros(own.tokens, partial.shape[1]).index_copy_(0, rows, partial)
    return full.chunk(own.group.size())[own.group.rank()].to(dtype)


@fault(SP, "collectives", figures="over tp")
def collective_per_chunk() -> Patch:
    """The head gathers after every chunk of tokens"""

    def chunks(real: Any, self: Any, *args: Any) -> Iterator[Any]:
        for part in real(self, *args):
            head._gather(part[2][:1, :1], self.group)
            yield part

    stack = ExitStack()
    stack.enter_context(wrap(head._Head, "chunks", chunks))
    stack.enter_context(wrap(*HEAD, lambda real, *args, **kw: real(*args, **kw | {"chunk_tokens": 16})))
    return stack


# Attention.


@fault(CP, "attention", packing, "local_runs")
def contiguous_chunks(real: Any, padded_lengths: Tensor, rank: int, size: int) -> Tensor:
    """Context-parallel ranks take contiguous chunks of a sequence"""
    share = padded_lengths[:, None] // size
    return torch.stack([rank * share, (rank + 1) * share], dim=-1)


@fault(CP, "attention", rope_utils, "_get_thd_freqs_on_this_cp_rank")
def rope_from_zero(real: Any, rank: int, size: int, x: Tensor, freqs: Tensor, *offset: Any) -> Tensor:
    """RoPE starts from 0 on each context-parallel rank"""
    return freqs[: len(x)]


@fault(DP, "attention", policy_loss, "Pack", split="1 micro-batch")
def packed_as_one(real: Any, **kwargs: Any) -> Any:
    """Packed sequences attend to one another"""
    borders = kwargs["cu_seqlens_q"][[0, -1]]
    both = {"cu_seqlens_q": borders, "cu_seqlens_kv": borders}
    both["batch"] = replace(kwargs["batch"], borders=borders)
    return real(**kwargs | both | dict.fromkeys(["max_seqlen_q", "max_seqlen_kv"], int(borders[-1])))


@fault(TP, "head", packed_attention, "make_calls")
def future_visible(real: Any, *args: Any) -> Any:
    """Attention is not causal"""
    return [call._replace(causal=False) for call in real(*args)]


@fault(DP, "attention", policy.Policy, "weights_loaded")
def weights_of_a_rank(real: Any, self: Any) -> None:
    """The last norm differs on rank 1"""
    if dist.get_rank() == 1:
        with torch.no_grad():
            self.chunks[-1].decoder.final_layernorm.weight.mul_(1.01)
    real(self)


# Shared prompts.


@fault(TP, "attention", packed_attention, "make_calls", share=True)
def prefix_not_seen(real: Any, *args: Any) -> Any:
    """Responses see only the last token of a shared prompt"""
    return real(*args)[:1]


@fault(TP, "attention", policy_loss, "forward", share=True)
def rope_off_by_one(real: Any, batch: Any, model: Any) -> Tensor:
    """RoPE is off by one behind a shared prompt"""
    moved = batch.position_ids.clone()
    for prefix in batch.prefixes:
        moved[:, (batch.segment >= prefix.sequences.start) & (batch.segment < prefix.sequences.stop)] -= 1
    return real(replace(batch, position_ids=moved), model)


@fault(TP, "backward", packed_attention, "_gradients", figures="self_attn", share=True)
def sum_of_a_part(real: Any, slope: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    """Backward omits the shared prompt from the log-sum-exp"""
    out, logs, call, _, scale = rest
    if call.causal:
        logs = packed_attention._attend(query, key, value, call, scale)[1]
    return real(slope, query, key, value, out, logs, *rest[2:])


@fault(TP, "backward", packed_attention, "_gradients", figures="self_attn", share=True)
def prefix_once_per_response(real: Any, *args: Any) -> Any:
    """Key and value gradients of a shared prompt count once per response"""
    query, *pair = real(*args)
    call = args[6]
    if not call.causal:
        pair = [3 * slope for slope in pair]
    return query, *pair


# Gradients.


@fault(CP, "key-value-gradient", layers, "gather_from_sequence_parallel_region")
def key_gradients_not_scattered(real: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Key and value gradients stay on the context-parallel rank that used them"""
    return real(*args, tensor_parallel_output_grad=False, **kwargs)


@fault(CP, "not-reduced", DistributedDataParallel, "finish_grad_sync")
def gradients_not_reduced(real: Any, *args: Any, **kwargs: Any) -> None:
    """Gradients are not summed over data- and context-parallel ranks"""


@fault(SP, "norms", layers.RMSNorm, "__init__")
def norms_not_summed(real: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Norm gradients are not summed over sequence-parallel ranks"""
    real(self, *args, **kwargs)
    self.weight.sequence_parallel = False


@fault(MOE, "expert-gradient", DistributedDataParallel, "__init__")
def experts_as_others(real: Any, self: Any, config: Any, settings: Any, module: Any, **kwargs: Any) -> None:
    """Expert gradients are summed over the ranks of other parameters"""
    for parameter in module.parameters():
        parameter.allreduce = True
    real(self, config, settings, module, **kwargs)


@fault(EP, "expert-gradient", DistributedDataParallel, "finish_grad_sync")
def experts_not_reduced(real: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Expert gradients are not summed over ranks with the same experts"""
    self.expert_parallel_bucket_groups = []
    real(self, *args, **kwargs)


@fault(EP, "router", router.TopKRouter, "__init__", figures="mlp.gate")
def router_not_summed(real: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Router gradients are not summed over sequence-parallel ranks"""
    real(self, *args, **kwargs)
    self.weight.sequence_parallel = False


@fault(SP, "tied-embedding", head, "_deliver", tied=True)
def tied_gradient_lost(real: Any, weight: Any, total: Tensor) -> Tensor:
    """The embedding's gradient is not added to the head's"""
    gradient = real(weight, total)
    weight.zero_out_wgrad = False
    return gradient


@fault(DP, "tied-embedding", head, "_accumulator", tied=True, split="uneven")
def tied_gradient_overwritten(real: Any, weight: Any, dtype: torch.dtype) -> Tensor:
    """The head's gradient overwrites main_grad"""
    weight.main_grad.zero_()
    return real(weight, dtype)


@fault(PP, "tied-embedding", finalize, "_allreduce_word_embedding_grads", tied=True)
def tied_stages_not_summed(real: Any, *args: Any, **kwargs: Any) -> None:
    """First and last stage do not add their gradients"""


@fault(PP, "grad-norm", optimizer, "param_is_not_shared", tied=True, dtypes=(torch.float32,))
def tied_copy_in_norm(real: Any, parameter: Any) -> bool:
    """The gradient norm counts the last stage's copy of the embedding"""
    return True


@fault(MOE, "replay", torch.Tensor, "gather", replay=True)
def scores_of_chosen_only(real: Any, values: Tensor, dim: int, index: Tensor) -> Tensor:
    """Replayed experts outside the router's top choices get weight 0"""
    if values.shape[-1] != MIXTURE.num_experts:
        return real(values, dim, index)
    best = values.topk(index.shape[1], dim=dim).indices
    return real(torch.full_like(values, -1e4).scatter(dim, best, real(values, dim, best)), dim, index)


@fault(EP, "replay", policy.Policy, "with_routers", replay=True)
def stale_routes(real: Any, self: Any, micro_batches: Any, **options: Any) -> Any:
    """The update replays the routes of the previous micro-batch"""
    if "routes" in micro_batches.columns:
        first, *others = micro_batches.columns["routes"]
        moved = [first] + [
            torch.cat([before[: len(own)], own[len(before) :]])
            for before, own in zip([first, *others[:-1]], others, strict=True)
        ]
        micro_batches = micro_batches.with_columns(routes=moved)
    return real(self, micro_batches, **options)


@fault(EP, "router", policy_router, "megatron_loss", loss="router-losses")
def losses_per_packed_token(real: Any, objective: Tensor, totals: Any) -> Tensor:
    """Router losses are scaled by the wrong number of tokens"""
    return real(objective, replace(totals, packed_tokens=totals.packed_tokens + 64))


@fault("moe.cp2.dp2", "router", policy_router.PolicyRouter, "_losses", loss="router-losses")
def loads_not_summed(real: Any, self: Any, *args: Any) -> Any:
    """Expert load counts this rank's tokens only"""
    self.tp_cp_group, group = ALONE, self.tp_cp_group
    try:
        return real(self, *args)
    finally:
        self.tp_cp_group = group


# Adapters.

LORA = "tp2.sp.cp2.lora"


@fault(LORA, "adapter", lora, "_install")
def whole_factor_of_a_rank(real: Any, module: Any, *args: Any) -> None:
    """The gradient of the unsharded factor covers one tensor rank's tokens"""
    real(module, *args)
    for factor in module.adapters.parameters():
        vars(factor)["sequence_parallel"] = False


@fault(LORA, "adapter", lora, "_adapters")
def adapter_scaled_twice(real: Any, arch: Any) -> Any:
    """The adapter's scale is applied twice"""
    return replace(real(arch), scale=real(arch).scale ** 2)


@fault(LORA, "adapter", lora, "_in_order")
def keys_for_values(real: Any, sums: dict[str, Tensor], *args: Any) -> Tensor:
    """Adapters of keys and values are swapped"""
    return real(sums | {"k": sums["v"], "v": sums["k"]} if "k" in sums else sums, *args)


@fault("recompute.dp4.lora", "adapter", lora, "_want_gradient")
def frozen_inputs_recomputed(real: Any, *args: Any) -> None:
    """Recomputed layers get inputs without gradient"""
