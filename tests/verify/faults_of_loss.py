"""Faults in which tokens and sequences count, in the loss, and in the reductions that make S."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from patching import ALONE, CP, DP, PP, SP, TP, Patch, fault, wrap
from torch import Tensor

from megatron_fspo.losses import DAPOLoss, FSPOLoss, GRPOLoss
from megatron_fspo.mcore.model import policy, policy_loss
from megatron_fspo.objective import FSPOBand, surrogate
from megatron_fspo.packing import pack as packing
from megatron_fspo.packing.batch import MicroBatch
from megatron_fspo.parallel import segments

SUMS = (policy_loss, "sequence_sums")
PREFIX_SUMS = (policy_loss, "prefix_sums")
LOSS = (policy_loss.PolicyLoss, "loss")
MEGATRON_LOSS = (policy_loss, "megatron_loss")
BACKWARD = (policy.Policy, "backward")
COLLATE = (packing, "collate")
MIN_FORM = (surrogate, "min_form")

# S.


@fault(CP, "sum-tokens", *SUMS)
def cp_sum_skipped(real: Any, values: Tensor, **kwargs: Any) -> Tensor:
    """S sums the tokens of this rank only"""
    return real(values, **kwargs | {"group": ALONE})


@fault(PP, "sum-factor", *SUMS)
def cp_sum_twice(real: Any, values: Tensor, **kwargs: Any) -> Tensor:
    """S is reduced twice over context-parallel ranks"""
    sums = real(values, **kwargs)
    dist.all_reduce(sums, group=kwargs["group"])
    return sums


@fault(DP, "mask", *SUMS)
def mask_multiplied(real: Any, values: Tensor, *, mask: Tensor, **kwargs: Any) -> Tensor:
    """S multiplies by the mask, with NaN old log-probs outside it"""
    return real(values * mask, mask=torch.ones_like(mask), **kwargs)


@fault(SP, "sum-mean", surrogate.SequenceLevel, "__call__")
def mean_for_sum(real: Any, self: Any, inputs: Any) -> Any:
    """S is the mean log-ratio"""
    sums = inputs.sequence_sums
    return real(self, replace(inputs, sequence_sums=lambda x: sums(x) / inputs.lengths.clamp(min=1)))


@fault(DP, "sum-rounding", *SUMS)
def ratios_in_bf16(real: Any, values: Tensor, **kwargs: Any) -> Tensor:
    """Log-ratios are rounded to bf16 before the sum"""
    return real(values.bfloat16().to(values.dtype), **kwargs)


@fault(DP, "sum-rounding", dtypes=(torch.float32,))
def sums_subtracted() -> Patch:
    """S is the difference of two sums of log-probs"""
    new: list[Tensor] = []

    def scored(real: Any, *args: Any, **kwargs: Any) -> Any:
        log_probs, entropy = real(*args, **kwargs)
        new[:] = [log_probs.detach()]
        return log_probs, entropy

    def difference(real: Any, ratio: Tensor, **kwargs: Any) -> Tensor:
        return real(new[0][None], **kwargs) - real(new[0] - ratio, **kwargs)

    stack = ExitStack()
    stack.enter_context(wrap(policy_loss, "linear_log_probs", scored))
    stack.enter_context(wrap(*SUMS, difference))
    return stack


@fault(CP, "collectives", *SUMS, figures="over cp", split="1 micro-batch")
def collective_per_sequence(
    real: Any, values: Tensor, *, mask: Tensor, segment: Tensor, **kwargs: Any
) -> Tensor:
    """S is reduced sequence by sequence"""
    numbers = range(kwargs["num_segments"])
    parts = [real(values, mask=mask & (segment == i), segment=segment, **kwargs) for i in numbers]
    return torch.stack(parts).sum(0) if parts else real(values, mask=mask, segment=segment, **kwargs)


# S of prefixes, which CTPO clips.


@fault(CP, "clip", *PREFIX_SUMS, loss="ctpo")
def prefix_of_this_rank(real: Any, values: Tensor, **kwargs: Any) -> Tensor:
    """CTPO: prefixes sum the tokens of this rank only"""
    mine = {"group": ALONE, "borders": kwargs["borders"] // kwargs["group"].size()}
    return real(values, **kwargs | mine)


@fault(CP, "clip", segments, "added_up", loss="ctpo", split="1 micro-batch")
def prefix_one_chunk_off(real: Any, sums: Tensor, group: Any) -> Tensor:
    """CTPO: prefix sums are off by one context-parallel chunk"""
    return real(sums, group).roll(1, 0) if sums.dim() == 4 and len(sums) == 4 else real(sums, group)


@fault(SP, "clip", segments, "_sum_earlier", loss="ctpo")
def prefix_of_a_row(real: Any, totals: Tensor, owner: Tensor) -> Tensor:
    """CTPO: prefixes restart with every row of a trajectory"""
    return torch.zeros_like(totals)


@fault(CP, "clip", *COLLATE, loss="fspo-turn")
def turns_as_one(real: Any, *args: Any) -> MicroBatch:
    """S by turn: the clip decides for the whole trajectory"""
    return replace(real(*args), turns=None)


# Normalisers.


def _sequences(*batches: MicroBatch) -> int:
    return sum(int((batch.lengths > 0).sum()) for batch in batches)


def _tokens(*batches: MicroBatch) -> int:
    return sum(int(batch.lengths.sum()) for batch in batches)


def _counting(batch: MicroBatch, **totals: int) -> MicroBatch:
    return replace(batch, totals=replace(batch.totals, **totals))


@fault(DP, "weighting", *LOSS)
def micro_batch_mean(real: Any, self: Any, batch: MicroBatch, *args: Any) -> Any:
    """The loss is a mean over each micro-batch"""
    sequences, tokens = max(1, _sequences(batch)), max(1, _tokens(batch))
    counted = _counting(batch, num_sequences=sequences, num_tokens=tokens, packed_tokens=tokens)
    return real(self, counted, *args)


@fault(CP, "denominator", *BACKWARD, split="uneven")
def local_n(real: Any, self: Any, batches: Sequence[MicroBatch], loss: Any) -> Any:
    """N counts the sequences of this rank"""
    return real(self, [_counting(batch, num_sequences=_sequences(*batches)) for batch in batches], loss)


@fault(DP, "denominator", *BACKWARD, split="uneven")
def local_t(real: Any, self: Any, batches: Sequence[MicroBatch], loss: Any) -> Any:
    """T counts the tokens of this rank"""
    tokens = _tokens(*batches)
    return real(self, [_counting(one, num_tokens=tokens, packed_tokens=tokens) for one in batches], loss)


@fault(DP, "denominator", GRPOLoss, "objective", loss="grpo")
def token_mean_for_sequence_mean(real: Any, self: GRPOLoss) -> Any:
    """GRPO takes the mean over tokens"""
    return DAPOLoss(eps_low=self.eps_low, eps_high=self.eps_high, dual_clip_ratio=self.dual_clip_ratio)


@fault(CP, "factor", *BACKWARD, figures="0.125 x", split="8 micro-batches")
def divided_by_micro_batches(real: Any, self: Any, batches: Sequence[MicroBatch], loss: Any) -> Any:
    """The loss is divided by the number of micro-batches"""
    with wrap(*MEGATRON_LOSS, lambda real, *args, **kw: real(*args, **kw) / len(batches)):
        return real(self, batches, loss)


@fault(PP, "factor", *MEGATRON_LOSS, figures="(2 x")
def loss_times_cp(real: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The loss is multiplied by the number of context-parallel ranks"""
    return real(*args, **kwargs) * 2


@fault(TP, "factor", *MEGATRON_LOSS, figures="0.9999999", dtypes=(torch.float64,))
def epsilon_in_the_mean(real: Any, objective: Tensor, totals: Any) -> Tensor:
    """The mean divides by N + 1e-6"""
    return real(objective, replace(totals, num_sequences=totals.num_sequences + 1e-6))


@fault(CP, "weighting", policy, "transformer_config", split="8 micro-batches")
def per_token_loss_off(real: Any, *args: Any, **kwargs: Any) -> Any:
    """calculate_per_token_loss is off"""
    config = real(*args, **kwargs)
    config.calculate_per_token_loss = False
    return config


# Which tokens and sequences.


@fault(SP, "tokens", *COLLATE)
def prompt_in_mask(real: Any, sequences: Any, rows: Sequence[int], *rest: Any) -> MicroBatch:
    """Prompt tokens count as response tokens"""
    batch = real(sequences, rows, *rest)
    prompts = torch.tensor([*sequences.prompt_lengths[[*rows]].tolist(), 0])[batch.segment]
    mask = batch.loss_mask | (batch.position_ids[0] < prompts - 1)
    return replace(batch, loss_mask=mask, rows=mask.nonzero()[:, 0])


@fault(CP, "tokens", *COLLATE)
def inserted_in_mask(real: Any, sequences: Any, *rest: Any) -> MicroBatch:
    """Tokens that an environment inserted are trained on"""
    return real(replace(sequences, loss_mask=None), *rest)


@fault(CP, "tokens", *COLLATE, loss="sft")
def turns_of_the_user_learned(real: Any, sequences: Any, *rest: Any) -> MicroBatch:
    """SFT: turns of the user are learned"""
    return real(replace(sequences, loss_mask=None), *rest)


@fault(CP, "attention", *COLLATE, loss="sft")
def mask_one_off(real: Any, sequences: Any, *rest: Any) -> MicroBatch:
    """SFT: the mask is shifted by one token"""
    return real(replace(sequences, loss_mask=sequences.loss_mask.roll(1)), *rest)


@fault(CP, "denominator", *LOSS, loss="sft")
def mean_over_each_pack(real: Any, self: Any, batch: MicroBatch, *args: Any) -> Any:
    """SFT: each pack has a mean of its own"""
    return real(self, _counting(batch, num_tokens=max(1, _tokens(batch))), *args)


@fault(CP, "attention", *COLLATE)
def rows_not_apart(real: Any, sequences: Any, *rest: Any) -> MicroBatch:
    """Rows of a trajectory attend to earlier rows"""
    return real(replace(sequences, row_starts=None), *rest)


@fault(CP, "denominator", *COLLATE)
def inserted_in_length(real: Any, sequences: Any, *rest: Any) -> MicroBatch:
    """L counts tokens that an environment inserted"""
    return real(replace(sequences, lengths=sequences.response_lengths), *rest)


@fault(PP, "head", *COLLATE)
def labels_not_shifted(real: Any, *args: Any) -> MicroBatch:
    """The label of a position is its own token"""
    batch = real(*args)
    return replace(batch, labels=batch.tokens[0])


@fault(DP, "sequences", *BACKWARD)
def micro_batch_dropped(real: Any, self: Any, batches: Sequence[MicroBatch], loss: Any) -> Any:
    """Rank 1 drops its last micro-batch"""
    return real(self, batches[:-1] if dist.get_rank() == 1 else batches, loss)


@fault(DP, "sequences", *COLLATE)
def sequence_twice(real: Any, sequences: Any, rows: Sequence[int], *rest: Any) -> MicroBatch:
    """Rank 1 repeats a sequence of another rank"""
    more = [9] if dist.get_rank() == 1 and 9 not in rows else []
    return real(sequences, [*rows, *more], *rest)


@fault(CP, "clip", *LOSS, split="1 micro-batch")
def advantages_of_others(real: Any, self: Any, batch: MicroBatch, *args: Any) -> Any:
    """Advantages are in reverse order"""
    return real(self, replace(batch, advantages=batch.advantages.flip(0)), *args)


@fault(DP, "weighting", *BACKWARD)
def accumulation_lost(real: Any, self: Any, *args: Any) -> Any:
    """main_grad is reset after the first micro-batch"""
    calls = itertools.count()

    def loss(real: Any, own: Any, *args: Any) -> Any:
        if next(calls) == 1:
            for parameter in self.chunks[0].parameters():
                parameter.main_grad.zero_()
        return real(own, *args)

    with wrap(*LOSS, loss):
        return real(self, *args)


# The objective.


@fault(CP, "clip", surrogate, "sequence_surrogate")
def clip_on_the_mean(real: Any, total: Tensor, lengths: Tensor, *rest: Any, **kwargs: Any) -> Any:
    """The clip uses the mean log-ratio"""
    return real(total / lengths.clamp(min=1), lengths, *rest, **kwargs)


@fault(CP, "weighting", *MIN_FORM)
def clipped_keep_gradient(real: Any, *args: Any, **kwargs: Any) -> Any:
    """Clipped sequences keep the gradient of the band's edge"""
    rows = real(*args, **kwargs)
    scale = args[5]
    return replace(rows, weight=scale * rows.objective)


@fault(DP, "clipped-gradient", *MIN_FORM, loss="all-clipped")
def all_clipped_keep_gradient(real: Any, *args: Any, **kwargs: Any) -> Any:
    """The gradient is not 0 when all sequences are clipped"""
    rows = real(*args, **kwargs)
    return replace(rows, weight=args[5] * rows.objective)


@fault(CP, "clip", FSPOLoss, "objective", loss="fspo-dual")
def dual_clip_ignored(real: Any, self: FSPOLoss) -> Any:
    """The dual clip is missing"""
    return replace(real(self), dual_clip=None)


@fault(TP, "clip", FSPOBand, "bounds", loss="fspo-drift")
def drift_sign(real: Any, self: FSPOBand, lengths: Tensor) -> Any:
    """The drift has the wrong sign"""
    return real(replace(self, drift=-self.drift), lengths)


@fault(DP, "regularizer", *BACKWARD, loss="grpo-kl")
def kl_sign(real: Any, self: Any, batches: Sequence[MicroBatch], loss: Any) -> Any:
    """The KL penalty is a bonus"""
    return real(self, batches, replace(loss, kl_coef=-loss.kl_coef))


@fault(CP, "denominator", *BACKWARD, figures="actor/kl_loss", loss="distil")
def teacher_of_another_row(real: Any, self: Any, batches: Sequence[MicroBatch], loss: Any) -> Any:
    """Distillation: the teacher scored other tokens"""
    others = [replace(one, reference_log_probs=one.reference_log_probs.roll(5)) for one in batches]
    return real(self, others, loss)


@fault(DP, "regularizer", *BACKWARD, loss="gspo-entropy")
def entropy_over_sequences(real: Any, self: Any, batches: Sequence[MicroBatch], loss: Any) -> Any:
    """The entropy bonus is divided by N"""
    totals = batches[0].totals
    factor = totals.num_tokens / totals.num_sequences
    return real(self, batches, replace(loss, entropy_coef=loss.entropy_coef * factor))


@fault(CP, "mask", policy_loss.PolicyLoss, "_kl_gap", figures="actor/kl_loss", loss="grpo-kl")
def kl_mask_multiplied(real: Any, self: Any, batch: MicroBatch, log_probs: Tensor) -> Tensor:
    """KL multiplies by the mask, with NaN reference log-probs outside it"""
    return (log_probs - batch.reference_log_probs) * batch.loss_mask
