"""The policy loss as Megatron's ``forward_step`` / ``loss_func`` pair.

It needs nothing of our trainer: hand ``PolicyLoss(...).forward_step`` to ``get_forward_backward_func()``
with an iterator of :class:`~megatron_fspo.packing.batch.MicroBatch` (see ``examples/plugin_only``). The
model's config must have ``calculate_per_token_loss=True``.

Per micro-batch: logits → log-probs (two tensor-parallel collectives) → new - old per token → S per sequence
(one context-parallel all-reduce) → weights → -Σ weight_t · logp_t.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn import Module

from megatron_fspo.mcore.normalise import megatron_loss
from megatron_fspo.objective.calibration import k3_kl
from megatron_fspo.objective.policy import LossInputs, LossTerms, PolicyObjective
from megatron_fspo.packing.batch import MicroBatch
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.parallel.segments import sequence_sums
from megatron_fspo.parallel.vocab import vocab_parallel_log_probs

LossOutput = tuple[Tensor, Tensor, dict[str, Tensor]]
Observer = Callable[[MicroBatch, Tensor, LossTerms], None]


def forward(batch: MicroBatch, model: Module) -> Tensor:
    """Logits [1, t, V / tp] of a packed micro-batch (hidden states on an earlier pipeline stage)."""
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.borders,
        cu_seqlens_kv=batch.borders,
        max_seqlen_q=batch.longest,
        max_seqlen_kv=batch.longest,
    )
    logits: Tensor = model(batch.tokens, batch.position_ids, None, packed_seq_params=packed)
    return logits


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Turns logits into log-probs of the labels: the same way in every pass."""

    groups: ParallelGroups
    vocab_size: int
    """Without padding."""
    temperature: float
    """The rollout's: the policy that is trained is the one that sampled."""

    def __call__(self, batch: MicroBatch, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs [t] and entropies [t] of one micro-batch, fp32."""
        return vocab_parallel_log_probs(
            logits[0],
            batch.labels,
            group=self.groups.tp,
            vocab_size=self.vocab_size,
            temperature=self.temperature,
        )


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """A policy objective on Megatron's schedule."""

    objective: PolicyObjective
    scoring: Scoring
    entropy_coef: float = 0.0
    """Times the mean entropy per response token of the step, added to J."""
    observer: Observer | None = None
    """Called with every micro-batch, its S [n], and what the loss says of it."""

    def forward_step(
        self, data_iterator: Iterator[MicroBatch], model: Module
    ) -> tuple[Tensor, Callable[[Tensor], LossOutput]]:
        """Megatron's ``forward_step_func``."""
        batch = next(data_iterator)
        return forward(batch, model), partial(self.loss, batch)

    def loss(self, batch: MicroBatch, logits: Tensor) -> LossOutput:
        """Megatron's ``loss_func``.

        Returns:
            the loss, this rank's valid tokens (int), and metrics as [sum, denominator] pairs that add up
            over micro-batches and over data × context parallel ranks.
        """
        log_probs, entropy = self.scoring(batch, logits)
        old = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
        # The difference first, the sum later: sums of thousands of log-probs would cancel.
        log_ratio = log_probs.detach() - old
        log_ratio_sum = sequence_sums(
            log_ratio, batch.mask, batch.segment, batch.lengths.numel(), group=self.scoring.groups.cp
        )
        terms = self.objective(
            LossInputs(
                log_ratio=log_ratio,
                mask=batch.mask,
                segment=batch.segment,
                log_ratio_sum=log_ratio_sum,
                lengths=batch.lengths,
                advantages=batch.advantages,
                num_sequences=batch.num_sequences,
                num_tokens=batch.num_tokens,
            )
        )
        if self.observer is not None:
            self.observer(batch, log_ratio_sum, terms)

        used = terms.weight != 0
        objective = torch.where(used, terms.weight * log_probs, 0.0).sum()
        if self.entropy_coef:
            scored = batch.mask & torch.isfinite(entropy.detach())
            bonus = torch.where(scored, entropy, 0.0).sum() / max(batch.num_tokens, 1)
            objective = objective + self.entropy_coef * bonus * batch.num_sequences
        loss = megatron_loss(objective, num_sequences=batch.num_sequences, num_tokens=batch.num_tokens)
        return loss, batch.mask.sum().int(), _metrics(batch, log_ratio, entropy.detach(), terms)


def _metrics(batch: MicroBatch, log_ratio: Tensor, entropy: Tensor, terms: LossTerms) -> dict[str, Tensor]:
    """Per-token metrics, and the objective; per-sequence ones come from the observer's records."""
    kept = batch.mask & torch.isfinite(log_ratio) & torch.isfinite(entropy)
    tokens = kept.sum()
    ratio = torch.where(kept, log_ratio, 0.0)
    k3_sum, k3_count = k3_kl(ratio, kept)
    pairs = {
        # Denominators that add up to 1 over the step: the mean is over N sequences, whoever holds them.
        "actor/pg_loss": (
            -terms.objective / max(batch.num_sequences, 1),
            batch.mask.sum() / max(batch.num_tokens, 1),
        ),
        "actor/entropy": (torch.where(kept, entropy, 0.0).sum(), tokens),
        "actor/ppo_kl": (-ratio.sum(), tokens),
        "fspo/kl_k3": (k3_sum, k3_count),
    }
    return {
        name: torch.stack([torch.as_tensor(total).double(), torch.as_tensor(count).double()])
        for name, (total, count) in pairs.items()
    }
