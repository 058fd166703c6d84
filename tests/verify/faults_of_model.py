"""Faults in the head, in attention, and in what happens to gradients after the loss."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.embeddings import rope_utils
from patching import ALONE, CP, DP, PP, SP, TP, Patch, fault, wrap
from torch import Tensor

from megatron_fspo.mcore import layers, policy, policy_loss
from megatron_fspo.packing import pack as packing
from megatron_fspo.parallel import head

# Their packages have functions of the same names.
finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
optimizer = importlib.import_module("megatron.core.optimizer.optimizer")

# The head.


def _change_head(**changes: Callable[[Any], Any]) -> Patch:
    """Arguments of the head."""

    def scored(real: Any, *args: Any, **kwargs: Any) -> Any:
        return real(*args, **kwargs | {name: change(kwargs.get(name)) for name, change in changes.items()})

    return wrap(policy_loss, "linear_log_probs", scored)


@fault(SP, "head")
def temperature_ignored() -> Patch:
    """Log-probs are those of temperature 1"""
    return _change_head(temperature=lambda _: 1.0)


@fault(SP, "head")
def padded_vocabulary() -> Patch:
    """The rows that pad the vocabulary have probability"""
    return _change_head(vocab_size=lambda size: size + 1)


@fault(TP, "head")
def statistics_not_combined() -> Patch:
    """The softmax runs over the vocabulary of tensor rank 0"""
    return wrap(head, "_combine", lambda real, table: real(table[:1]))


@fault(SP, "denominator", figures="actor/entropy", loss="fspo-entropy-kl")
def entropy_not_combined() -> Patch:
    """The entropy is that of tensor rank 0"""

    def combine(real: Any, table: Tensor) -> Tensor:
        top, total, _, log_prob = real(table)
        return torch.stack([top, total, real(table[:1])[2], log_prob])

    return wrap(head, "_combine", combine)


@fault(TP, "head-gradient")
def hidden_gradient_not_reduced() -> Patch:
    """The head's gradient of hidden states is that of this tensor rank's vocabulary"""
    return wrap(
        head,
        "_hidden_gradient",
        lambda real, partial, rows, dtype, own: real(partial, rows, dtype, replace(own, group=ALONE)),
    )


@fault(SP, "head-gradient")
def hidden_gradient_not_scattered() -> Patch:
    """The same under sequence parallel: a slice without the sum"""

    def own_slice(real: Any, partial: Tensor, rows: Tensor, dtype: torch.dtype, own: Any) -> Tensor:
        full = partial.new_zeros(own.tokens, partial.shape[1]).index_copy_(0, rows, partial)
        return full.chunk(own.group.size())[own.group.rank()].to(dtype)

    return wrap(head, "_hidden_gradient", own_slice)


@fault(SP, "collectives", figures="over tp")
def collective_per_chunk() -> Patch:
    """The head gathers something after every chunk of tokens"""

    def chunks(real: Any, self: Any, *args: Any) -> Iterator[Any]:
        for part in real(self, *args):
            head._gather(part[2][:1, :1], self.group)
            yield part

    stack = ExitStack()
    stack.enter_context(wrap(head._Head, "chunks", chunks))
    stack.enter_context(_change_head(chunk_tokens=lambda _: 16))
    return stack


# Attention.


@fault(CP, "attention")
def contiguous_chunks() -> Patch:
    """Each context-parallel rank takes one contiguous chunk of a sequence"""

    def contiguous(real: Any, padded_lengths: Tensor, rank: int, size: int) -> Tensor:
        share = padded_lengths[:, None] // size
        return torch.stack([rank * share, (rank + 1) * share], dim=-1)

    return wrap(packing, "local_runs", contiguous)


@fault(CP, "attention")
def rope_from_zero() -> Patch:
    """RoPE counts the tokens of each context-parallel rank from 0"""
    return wrap(
        rope_utils,
        "_get_thd_freqs_on_this_cp_rank",
        lambda real, rank, size, x, freqs, *offset: freqs[: len(x)],
    )


@fault(DP, "attention", split="1 micro-batch")
def packed_as_one() -> Patch:
    """Packed sequences see one another"""

    def packed(real: Any, **kwargs: Any) -> Any:
        borders = kwargs["cu_seqlens_q"][[0, -1]]
        both = {"cu_seqlens_q": borders, "cu_seqlens_kv": borders}
        return real(**kwargs | both | dict.fromkeys(["max_seqlen_q", "max_seqlen_kv"], int(borders[-1])))

    return wrap(policy_loss, "PackedSeqParams", packed)


@fault(TP, "head")
def future_visible() -> Patch:
    """Attention is not causal"""
    return wrap(layers.SDPACoreAttention, "_attend", lambda real, *args, causal=False, mask=None: real(*args))


@fault(DP, "attention")
def weights_of_a_rank() -> Patch:
    """The last norm has another weight on rank 1"""

    def loaded(real: Any, self: Any) -> None:
        if dist.get_rank() == 1:
            with torch.no_grad():
                self.chunks[-1].decoder.final_layernorm.weight.mul_(1.01)
        real(self)

    return wrap(policy.Policy, "weights_loaded", loaded)


# Gradients.


@fault(CP, "key-value-gradient")
def key_gradients_not_scattered() -> Patch:
    """Gradients of keys and values stay on the context-parallel rank that used them"""
    return wrap(
        layers,
        "gather_from_sequence_parallel_region",
        lambda real, *args, **kwargs: real(*args, tensor_parallel_output_grad=False, **kwargs),
    )


@fault(CP, "not-reduced")
def gradients_not_reduced() -> Patch:
    """Gradients are not summed over data and context parallel ranks"""
    return wrap(DistributedDataParallel, "finish_grad_sync", lambda real, *args, **kwargs: None)


@fault(SP, "norms")
def norms_not_summed() -> Patch:
    """Gradients of norms are not summed over the ranks of sequence parallel"""

    def init(real: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.weight.sequence_parallel = False

    return wrap(layers.RMSNorm, "__init__", init)


@fault(SP, "tied-embedding", tied=True)
def tied_gradient_lost() -> Patch:
    """Megatron does not add the embedding's gradient to the head's"""

    def deliver(real: Any, weight: Any, total: Tensor) -> Tensor:
        found = real(weight, total)
        weight.zero_out_wgrad = False
        return found

    return wrap(head, "_deliver", deliver)


@fault(DP, "tied-embedding", tied=True, split="uneven")
def tied_gradient_overwritten() -> Patch:
    """The head's gradient replaces what is in main_grad"""

    def accumulator(real: Any, weight: Any, dtype: torch.dtype) -> Tensor:
        weight.main_grad.zero_()
        return real(weight, dtype)

    return wrap(head, "_accumulator", accumulator)


@fault(PP, "tied-embedding", tied=True)
def tied_stages_not_summed() -> Patch:
    """The embedding's gradient stays on the first stage, the head's on the last"""
    return wrap(finalize, "_allreduce_word_embedding_grads", lambda real, *args, **kwargs: None)


@fault(PP, "grad-norm", tied=True, dtypes=(torch.float32,))
def tied_copy_in_norm() -> Patch:
    """The gradient norm counts the embedding's copy on the last stage"""
    return wrap(optimizer, "param_is_not_shared", lambda real, parameter: True)
