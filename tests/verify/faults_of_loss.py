"""Faults in which tokens and sequences count, in the loss, and in the reductions that make S."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from patching import ALONE, CP, DP, PP, SP, TP, Patch, fault, wrap
from torch import Tensor

from megatron_fspo.losses import DAPOLoss, FSPOLoss, GRPOLoss
from megatron_fspo.mcore import policy, policy_loss
from megatron_fspo.objective import FSPOBand, policy_objective
from megatron_fspo.packing import pack as packing
from megatron_fspo.packing.batch import MicroBatch
from megatron_fspo.parallel import segments

# S.


@fault(CP, "sum-tokens")
def cp_sum_skipped() -> Patch:
    """S is summed over the tokens of this rank only"""
    return wrap(policy_loss, "sequence_sums", lambda real, x, **kw: real(x, **{**kw, "group": ALONE}))


@fault(PP, "sum-factor")
def cp_sum_twice() -> Patch:
    """S is reduced twice over context-parallel ranks"""

    def twice(real: Any, values: Tensor, *, group: Any, **kwargs: Any) -> Tensor:
        sums = real(values, group=group, **kwargs)
        dist.all_reduce(sums, group=group)
        return sums

    return wrap(policy_loss, "sequence_sums", twice)


@fault(DP, "mask")
def mask_multiplied() -> Patch:
    """S multiplies by the mask, where old log-probs outside it are NaN"""

    def multiplied(real: Any, values: Tensor, *, mask: Tensor, **kwargs: Any) -> Tensor:
        return real(values * mask, mask=torch.ones_like(mask), **kwargs)

    return wrap(policy_loss, "sequence_sums", multiplied)


@fault(SP, "sum-mean")
def mean_for_sum() -> Patch:
    """S is the mean log-ratio"""

    def mean(real: Any, self: Any, inputs: Any) -> Any:
        sums = inputs.sequence_sums
        return real(self, replace(inputs, sequence_sums=lambda x: sums(x) / inputs.lengths.clamp(min=1)))

    return wrap(policy_objective.SequenceLevel, "__call__", mean)


@fault(DP, "sum-rounding")
def ratios_in_bf16() -> Patch:
    """Log-ratios are rounded to bf16 before they are summed"""
    return wrap(policy_loss, "sequence_sums", lambda real, x, **kw: real(x.bfloat16().to(x.dtype), **kw))


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
    stack.enter_context(wrap(policy_loss, "sequence_sums", difference))
    return stack


@fault(CP, "collectives", figures="over cp", split="1 micro-batch")
def collective_per_sequence() -> Patch:
    """S is reduced sequence by sequence"""

    def one_by_one(real: Any, values: Tensor, *, mask: Tensor, segment: Tensor, **kwargs: Any) -> Tensor:
        numbers = range(kwargs["num_segments"])
        parts = [real(values, mask=mask & (segment == i), segment=segment, **kwargs) for i in numbers]
        return torch.stack(parts).sum(0) if parts else real(values, mask=mask, segment=segment, **kwargs)

    return wrap(policy_loss, "sequence_sums", one_by_one)


# S of prefixes, which CTPO clips.


@fault(CP, "clip", loss="ctpo")
def prefix_of_this_rank() -> Patch:
    """S of a prefix is summed over the tokens of this rank only"""
    return wrap(policy_loss, "prefix_sums", lambda real, x, **kw: real(x, **{**kw, "group": ALONE}))


@fault(CP, "clip", loss="ctpo", split="1 micro-batch")
def prefix_one_chunk_off() -> Patch:
    """S of a prefix takes each chunk of a sequence for the next one"""

    def shifted(real: Any, sums: Tensor, group: Any) -> Tensor:
        return real(sums, group).roll(1, 0) if sums.dim() == 4 and len(sums) == 4 else real(sums, group)

    return wrap(segments, "added_up", shifted)


@fault(SP, "clip", loss="ctpo")
def prefix_chunks_swapped() -> Patch:
    """S of a prefix takes the two chunks that a rank has of a sequence for each other"""
    return wrap(policy_loss, "prefix_sums", lambda real, x, **kw: real(x, **{**kw, "late": ~kw["late"]}))


# Normalisers.


def _change_batch(change: Callable[[MicroBatch], MicroBatch]) -> Patch:
    """What the loss sees of each micro-batch."""
    return wrap(
        policy_loss.PolicyLoss, "loss", lambda real, self, batch, *args: real(self, change(batch), *args)
    )


def _change_step(change: Callable[[Sequence[MicroBatch]], Sequence[MicroBatch]]) -> Patch:
    """What an optimizer step trains on."""
    return wrap(
        policy.Policy, "backward", lambda real, self, batches, loss: real(self, change(batches), loss)
    )


def _change_settings(change: Callable[[Any, MicroBatch], Any]) -> Patch:
    """The settings of the loss; given also any of the micro-batches."""
    return wrap(
        policy.Policy,
        "backward",
        lambda real, self, batches, loss: real(self, batches, change(loss, batches[0])),
    )


def _sequences(*batches: MicroBatch) -> int:
    return sum(int((batch.lengths > 0).sum()) for batch in batches)


def _tokens(*batches: MicroBatch) -> int:
    return sum(int(batch.lengths.sum()) for batch in batches)


def _counting(batch: MicroBatch, **totals: int) -> MicroBatch:
    return replace(batch, totals=replace(batch.totals, **totals))


@fault(DP, "weighting")
def micro_batch_mean() -> Patch:
    """The loss is the mean over the sequences of each micro-batch"""
    return _change_batch(
        lambda batch: _counting(
            batch,
            num_sequences=max(1, _sequences(batch)),
            num_tokens=max(1, _tokens(batch)),
            packed_tokens=max(1, _tokens(batch)),
        )
    )


@fault(CP, "denominator", split="uneven")
def local_n() -> Patch:
    """N counts the sequences of this rank"""
    return _change_step(lambda all: [_counting(batch, num_sequences=_sequences(*all)) for batch in all])


@fault(DP, "denominator", split="uneven")
def local_t() -> Patch:
    """T counts the tokens of this rank"""
    return _change_step(
        lambda all: [_counting(batch, num_tokens=_tokens(*all), packed_tokens=_tokens(*all)) for batch in all]
    )


@fault(DP, "denominator", loss="grpo")
def token_mean_for_sequence_mean() -> Patch:
    """GRPO takes the mean over tokens"""
    keys = ("eps_low", "eps_high", "dual_clip_ratio")
    return wrap(
        GRPOLoss, "objective", lambda real, self: DAPOLoss(**{key: getattr(self, key) for key in keys})
    )


@fault(CP, "factor", figures="0.125 x", split="8 micro-batches")
def divided_by_micro_batches() -> Patch:
    """The loss is divided by the number of micro-batches"""

    def backward(real: Any, self: Any, batches: Sequence[MicroBatch], loss: Any) -> Any:
        with wrap(policy_loss, "megatron_loss", lambda real, *args, **kw: real(*args, **kw) / len(batches)):
            return real(self, batches, loss)

    return wrap(policy.Policy, "backward", backward)


@fault(PP, "factor", figures="(2 x")
def loss_times_cp() -> Patch:
    """The loss is multiplied by the number of context-parallel ranks"""
    return wrap(policy_loss, "megatron_loss", lambda real, *args, **kwargs: real(*args, **kwargs) * 2)


@fault(TP, "factor", figures="0.9999999", dtypes=(torch.float64,))
def epsilon_in_the_mean() -> Patch:
    """The mean divides by N + 1e-6"""

    def loss(real: Any, objective: Tensor, totals: Any) -> Tensor:
        return real(objective, replace(totals, num_sequences=totals.num_sequences + 1e-6))

    return wrap(policy_loss, "megatron_loss", loss)


@fault(CP, "weighting", split="8 micro-batches")
def per_token_loss_off() -> Patch:
    """Megatron's calculate_per_token_loss is off"""

    def config(real: Any, *args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        found.calculate_per_token_loss = False
        return found

    return wrap(policy, "transformer_config", config)


# Which tokens and sequences.


def _change_pack(change: Callable[[MicroBatch, Tensor], MicroBatch]) -> Patch:
    """Change a micro-batch, given it and which of its positions [t] predict a token of a prompt."""

    def collate(real: Any, sequences: Any, rows: Sequence[int], **kwargs: Any) -> MicroBatch:
        batch = real(sequences, rows, **kwargs)
        prompts = torch.tensor([*sequences.prompt_lengths[[*rows]].tolist(), 0])[batch.segment]
        return change(batch, batch.position_ids[0] < prompts - 1)

    return wrap(packing, "collate", collate)


@fault(SP, "tokens")
def prompt_in_mask() -> Patch:
    """Prompt tokens count as response tokens"""
    return _change_pack(lambda batch, prompt: replace(batch, mask=batch.mask | prompt))


@fault(PP, "head")
def labels_not_shifted() -> Patch:
    """The label of a position is its own token"""
    return _change_pack(lambda batch, prompt: replace(batch, labels=batch.tokens[0]))


@fault(DP, "sequences")
def micro_batch_dropped() -> Patch:
    """Rank 1 leaves its last micro-batch out"""
    return _change_step(lambda all: all[:-1] if dist.get_rank() == 1 else all)


@fault(DP, "sequences")
def sequence_twice() -> Patch:
    """Rank 1 trains on a sequence that another rank has too"""

    def collate(real: Any, sequences: Any, rows: Sequence[int], **kwargs: Any) -> MicroBatch:
        more = [9] if dist.get_rank() == 1 and 9 not in rows else []
        return real(sequences, [*rows, *more], **kwargs)

    return wrap(packing, "collate", collate)


@fault(CP, "clip", split="1 micro-batch")
def advantages_of_others() -> Patch:
    """The advantages of a micro-batch are in reverse order"""
    return _change_batch(lambda batch: replace(batch, advantages=batch.advantages.flip(0)))


@fault(DP, "weighting")
def accumulation_lost() -> Patch:
    """main_grad starts again after the first micro-batch"""

    def backward(real: Any, self: Any, *args: Any) -> Any:
        calls = itertools.count()

        def loss(real: Any, own: Any, *args: Any) -> Any:
            if next(calls) == 1:
                for parameter in self.chunks[0].parameters():
                    parameter.main_grad.zero_()
            return real(own, *args)

        with wrap(policy_loss.PolicyLoss, "loss", loss):
            return real(self, *args)

    return wrap(policy.Policy, "backward", backward)


# The objective.


@fault(CP, "clip")
def clip_on_the_mean() -> Patch:
    """The clip looks at the mean log-ratio"""
    return wrap(
        policy_objective,
        "sequence_surrogate",
        lambda real, total, lengths, *rest, **kw: real(total / lengths.clamp(min=1), lengths, *rest, **kw),
    )


def _keep_gradient() -> Patch:
    def keep(real: Any, *args: Any, **kwargs: Any) -> Any:
        rows = real(*args, **kwargs)
        scale = args[5]
        return replace(rows, weight=scale * rows.objective)

    return wrap(policy_objective, "min_form", keep)


@fault(CP, "weighting")
def clipped_keep_gradient() -> Patch:
    """A clipped sequence keeps the gradient of the clip's edge"""
    return _keep_gradient()


@fault(DP, "clipped-gradient", loss="all-clipped")
def all_clipped_keep_gradient() -> Patch:
    """The same where all are clipped"""
    return _keep_gradient()


@fault(CP, "clip", loss="fspo-dual")
def dual_clip_ignored() -> Patch:
    """There is no dual clip"""
    return wrap(FSPOLoss, "_dual_clip", lambda real, self: None)


@fault(TP, "clip", loss="fspo-drift")
def drift_sign() -> Patch:
    """The band moves to the wrong side"""
    return wrap(
        FSPOBand, "bounds", lambda real, self, lengths: real(replace(self, drift=-self.drift), lengths)
    )


@fault(DP, "regularizer", loss="grpo-kl")
def kl_sign() -> Patch:
    """The KL to the reference policy is a bonus"""
    return _change_settings(lambda loss, batch: replace(loss, kl_coef=-loss.kl_coef))


@fault(DP, "regularizer", loss="gspo-entropy")
def entropy_over_sequences() -> Patch:
    """The entropy bonus is divided by N"""
    return _change_settings(
        lambda loss, batch: replace(
            loss, entropy_coef=loss.entropy_coef * batch.totals.num_tokens / batch.totals.num_sequences
        )
    )


@fault(CP, "mask", figures="actor/kl_loss", loss="grpo-kl")
def kl_mask_multiplied() -> Patch:
    """The KL multiplies by the mask, where reference log-probs outside it are NaN"""
    return wrap(
        policy_loss.PolicyLoss,
        "_kl_gap",
        lambda real, self, batch, log_probs: (log_probs - batch.reference_log_probs) * batch.mask,
    )
