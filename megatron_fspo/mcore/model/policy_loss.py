"""The policy loss as Megatron's ``forward_step`` / ``loss_func`` pair.

It does not depend on our trainer: pass ``PolicyLoss(...).forward_step`` and an iterator of
:class:`~megatron_fspo.packing.batch.MicroBatch` to ``get_forward_backward_func()`` (example:
``examples/plugin_only``). The model's config must have ``calculate_per_token_loss=True``.

Per micro-batch, on the last pipeline stage: hidden states → log-probs, without storing all logits →
new - old per token → S per sequence (one context-parallel all-reduce) → weights, decided by the first
context-parallel rank (one broadcast) → -Σ weight_t · logp_t.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor
from torch.nn import Module

from megatron_fspo.mcore.normalise import megatron_loss
from megatron_fspo.objective.surrogate import LossInputs, LossTerms, PolicyObjective, TurnInputs
from megatron_fspo.packing.batch import MicroBatch
from megatron_fspo.parallel.groups import ParallelGroups, broadcast_first
from megatron_fspo.parallel.head import HeadKind, linear_log_probs
from megatron_fspo.parallel.segments import prefix_sums, sequence_sums

LossOutput = tuple[Tensor, Tensor, dict[str, Tensor]]
Observer = Callable[[MicroBatch, LossTerms, Tensor], None]


@dataclass
class Pack(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of a pack, plus the micro-batch, for attention and expert routers."""

    batch: MicroBatch | None = None


def forward(batch: MicroBatch, model: Module) -> Tensor:
    """Run a model chunk on a packed micro-batch; return the input of the LM head on the last pipeline stage,
    of the next stage before it. [1, t, H], or [1, t / tp, H] under sequence parallelism."""
    gpt = _gpt(model)
    # Megatron restarts RoPE at every border. With shared prompts, pass one sequence, and angles per token.
    borders = batch.borders[:: len(batch.borders) - 1].contiguous() if batch.prefixes else batch.borders
    packed = Pack(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        max_seqlen_q=batch.longest,
        max_seqlen_kv=batch.longest,
        batch=batch,
    )
    with ExitStack() as stack:
        stack.enter_context(_output_layer_passes_on(gpt))
        if batch.prefixes and not gpt.config.multi_latent_attention:  # whose layers have the angles
            hook = partial(at_positions, positions=batch.row_positions)
            stack.enter_context(gpt.rotary_pos_emb.register_forward_hook(hook))
        hidden: Tensor = model(batch.tokens, batch.row_positions[None], None, packed_seq_params=packed)
    return hidden


def at_positions(module: Any, args: Any, angles: Any, positions: Tensor) -> Any:
    """Forward hook: select from angles [positions, ...], or with YaRN from the first of angles and factor."""
    return (angles[0][positions], angles[1]) if isinstance(angles, tuple) else angles[positions]


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Computes log-probs of the labels from hidden states, in the same way in every pass."""

    groups: ParallelGroups
    vocab_size: int
    """Without padding."""
    temperature: float
    """Sampling temperature of the rollout, so that the trained policy is the one that sampled."""
    head: HeadKind = "auto"

    def __call__(self, batch: MicroBatch, hidden: Tensor, model: Module) -> tuple[Tensor, Tensor]:
        """Return log-probs [t] and entropies [t] of a micro-batch, 0 outside its mask, fp32 (fp64 for fp64).
        Raises ``ValueError`` if a label is outside the vocabulary."""
        smallest, largest = batch.label_range
        if not 0 <= smallest <= largest < self.vocab_size:
            raise ValueError(f"labels from {smallest} to {largest}, but vocab_size is {self.vocab_size}")
        gpt = _gpt(model)
        shared = gpt.share_embeddings_and_output_weights
        weight = gpt.shared_embedding_or_output_weight() if shared else gpt.output_layer.weight
        return linear_log_probs(
            hidden[0].to(weight.dtype),  # Megatron widens the last stage's bf16 output to fp32
            weight,
            batch.labels,
            batch.rows,
            group=self.groups.tp,
            vocab_size=self.vocab_size,
            temperature=self.temperature,
            sequence_parallel=gpt.config.sequence_parallel,
            kind=self.head,
        )

    def forward_step(
        self, data_iterator: Iterator[MicroBatch], model: Module
    ) -> tuple[Tensor, Callable[..., Tensor]]:
        """Return Megatron's ``forward_step_func`` for a pass that collects log-probs [t], with
        ``forward_only=True, collect_non_loss_data=True``."""
        batch = next(data_iterator)
        return forward(batch, model), lambda hidden, non_loss_data=True: self(batch, hidden, model)[0]


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """A policy objective on Megatron's schedule.

    The loss is this, with N and T the sequences and response tokens of the whole optimizer step::

        -(1/N) Σ_i J_i  -  entropy_coef · (1/T) Σ_t H_t  +  kl_coef · (1/T) Σ_t ½ (log π - log π_ref)²

    The last term is the k2 estimate of the KL to the reference policy. Its expected gradient over samples of
    π is that of KL(π ‖ π_ref), unlike the gradient of the k3 estimate (arXiv 2510.01555).

    A micro-batch's ``rollout_weights`` multiply each token's gradient of the first term. They do not affect
    N, S, clip decisions, ``actor/pg_loss`` (J without them), entropy and KL.
    """

    objective: PolicyObjective
    scoring: Scoring
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    """If above 0, every micro-batch needs ``reference_log_probs``."""
    observer: Observer | None = None
    """Called on the last pipeline stage with every micro-batch, its loss terms, and its log-ratios [t]."""

    def forward_step(
        self, data_iterator: Iterator[MicroBatch], model: Module
    ) -> tuple[Tensor, Callable[[Tensor], LossOutput]]:
        """Return Megatron's ``forward_step_func``."""
        batch = next(data_iterator)
        return forward(batch, model), partial(self.loss, batch, model)

    def loss(self, batch: MicroBatch, model: Module, hidden: Tensor) -> LossOutput:
        """Return Megatron's ``loss_func``.

        Returns:
            the loss, this rank's number of valid tokens (int), and metrics as [sum, denominator] pairs, to be
            summed over micro-batches and over data × context parallel ranks.
        """
        log_probs, entropy = self.scoring(batch, hidden, model)
        old = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
        # Subtract before summing: sums of thousands of log-probs would cancel.
        log_ratio = log_probs.detach() - old
        where: dict[str, Any] = {"mask": batch.loss_mask, "group": self.scoring.groups.cp}
        terms = self.objective(
            LossInputs(
                log_probs=log_probs.detach(),
                log_ratio=log_ratio,
                loss_mask=batch.loss_mask,
                segment=batch.segment,
                sequence_sums=partial(
                    sequence_sums, segment=batch.segment, num_segments=batch.lengths.numel(), **where
                ),
                prefix_sums=partial(prefix_sums, borders=batch.borders, owner=batch.owner, **where),
                # Tensor-parallel ranks need not agree: in backward the head uses the first one's gradients.
                decided=lambda decisions: broadcast_first(decisions, self.scoring.groups.cp),
                lengths=batch.lengths,
                advantages=batch.advantages,
                num_sequences=batch.totals.num_sequences,
                num_tokens=batch.totals.num_tokens,
                turns=batch.turns
                and TurnInputs(
                    **batch.turns._asdict(),
                    sums=partial(
                        sequence_sums,
                        segment=batch.turns.segment,
                        num_segments=len(batch.turns.owner),
                        **where,
                    ),
                ),
            )
        )
        if self.observer is not None:
            self.observer(batch, terms, log_ratio)
        per_token = batch.totals.num_sequences / max(batch.totals.num_tokens, 1)
        kl_gap = self._kl_gap(batch, log_probs.detach())
        weight = terms.weight
        if batch.rollout_weights is not None:  # a weight of 0 (dropped, or outside the mask) stays 0
            weight = torch.where(weight != 0, weight * batch.rollout_weights, 0.0)
        weight = weight - self.kl_coef * per_token * kl_gap
        objective = torch.where(weight != 0, weight * log_probs, 0.0).sum()
        if self.entropy_coef:
            scored = batch.loss_mask & torch.isfinite(entropy.detach())
            objective = objective + self.entropy_coef * per_token * torch.where(scored, entropy, 0.0).sum()
        loss = megatron_loss(objective, batch.totals)
        return loss, batch.loss_mask.sum().int(), _metrics(batch, log_ratio, entropy.detach(), kl_gap, terms)

    def _kl_gap(self, batch: MicroBatch, log_probs: Tensor) -> Tensor:
        """[t] log π - log π_ref, also the derivative of the k2 term; 0 outside the mask or if not finite."""
        if not self.kl_coef:
            return torch.zeros_like(log_probs)
        assert batch.reference_log_probs is not None, "kl_coef > 0 needs reference_log_probs"
        gap = log_probs - batch.reference_log_probs
        return torch.where(batch.loss_mask & torch.isfinite(gap), gap, 0.0)


def _metrics(
    batch: MicroBatch, log_ratio: Tensor, entropy: Tensor, kl_gap: Tensor, terms: LossTerms
) -> dict[str, Tensor]:
    """Return per-token metrics and the objective; per-sequence metrics come from the observer's records."""
    kept = batch.loss_mask & torch.isfinite(log_ratio) & torch.isfinite(entropy)
    tokens = kept.sum()
    ratio = torch.where(kept, log_ratio, 0.0)
    k3_sum, k3_count = k3_kl(ratio, kept)
    pairs = {
        # Denominators sum to N over the step, so that the mean is over N sequences in every split.
        "actor/pg_loss": (
            -terms.objective,
            batch.totals.num_sequences * batch.loss_mask.sum().double() / max(batch.totals.packed_tokens, 1),
        ),
        "actor/entropy": (torch.where(kept, entropy, 0.0).sum(), tokens),
        "actor/ppo_kl": (-ratio.sum(), tokens),
        "actor/kl_loss": (0.5 * kl_gap.square().sum(), tokens),
        "fspo/kl_k3": (k3_sum, k3_count),
    }
    return {
        name: torch.stack([torch.as_tensor(total).double(), torch.as_tensor(count).double()])
        for name, (total, count) in pairs.items()
    }


def k3_kl(log_ratio_tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Estimate KL(old ‖ new) as sum/count over masked tokens of k3 = r − 1 − log r, r = π_new/π_old.

    Takes log r [T] in nats, of tokens sampled from the old policy; values outside the mask are ignored.
    Returns (sum, count), float64 scalars, to be summed over ranks before the division. Tokens with a
    non-finite k3 are in neither.
    """
    # expm1(x) − x keeps the digits of x²/2 that exp(x) − 1 − x would lose.
    log_ratio = log_ratio_tokens.detach().double()
    k3 = log_ratio.expm1() - log_ratio
    counted = mask & k3.isfinite()
    return torch.where(counted, k3, 0.0).sum(), counted.sum().double()


@contextmanager
def _output_layer_passes_on(gpt: GPTModel) -> Iterator[None]:
    """Context manager: the last stage's output layer returns its input; its hooks still fire. Not every
    supported version of ``GPTModel`` accepts a custom output layer."""
    if not gpt.post_process:
        yield
        return
    layer = gpt.output_layer
    layer.forward = lambda hidden, *_, **__: (hidden, None)  # shadows the class's method
    try:
        yield
    finally:
        del layer.forward


def _gpt(model: Module) -> GPTModel:
    """Return the ``GPTModel`` inside the wrappers for data parallelism and bf16."""
    gpt: GPTModel = get_attr_wrapped_model(
        model, "share_embeddings_and_output_weights", return_model_obj=True
    )
    return gpt
