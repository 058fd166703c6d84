"""How far the sampler's log-probs are from the trainer's: Δ = log π_trainer - log π_sampler, token by token.

It would be 0 if both computed alike. Other kernels and precisions make small noise; its sum over a response
spreads as √L, as S does. A bias, or much more, is a fault (see :mod:`.alarm`), or older weights: responses
that were sampled before the last updates differ by what those changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.objective import sigma_hat
from megatron_fspo.packing.batch import MicroBatch
from megatron_fspo.parallel.exact import ExactSums
from megatron_fspo.parallel.metrics import gather_lists, reduce_metrics


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Δ of one rollout: this rank's tokens, and every response as a whole."""

    deltas: tuple[Tensor, ...]
    """Per micro-batch of this rank [t], float64; 0 outside the mask."""
    sums: Tensor
    """[samples] Σ Δ over the whole response, on every rank; not finite where a token's Δ is not."""
    lengths: Tensor
    """[samples] response lengths."""


def token_deltas(batch: MicroBatch, score: Tensor) -> Tensor:
    """Δ [t] in float64 of a micro-batch scored by the trainer; 0 outside the mask."""
    return torch.where(batch.mask, (score - batch.sampled_log_probs).double(), 0.0)


def per_sample(
    batches: Sequence[MicroBatch], columns: Sequence[Tensor], samples: int, *, group: dist.ProcessGroup
) -> Tensor:
    """Per-token numbers added up over whole responses, wherever their tokens lie. Collective.

    Exact up to one rounding: the same bits on every rank, whatever the split into ranks and micro-batches.

    Args:
        batches, columns: this rank's, and for each [k, t] float64, 0 outside the mask.
        samples: of the whole rollout.
        group: data × context parallel.

    Returns:
        [k, samples] float64, on every rank.
    """
    sums = ExactSums(len(columns[0]), samples, device=columns[0].device)
    for batch, column in zip(batches, columns, strict=True):
        sums.add(column[:, batch.mask], batch.sample_index[batch.segment[batch.mask]])
    return sums.total(group)


def measure(
    batches: Sequence[MicroBatch],
    scores: Sequence[Tensor],
    lengths: Sequence[int],
    *,
    group: dist.ProcessGroup,
) -> Mismatch:
    """Compare the old pass with the sampler. Collective.

    Args:
        batches, scores: this rank's, and the old pass's log-probs of their labels, [t] each.
        lengths: response lengths of all samples of the rollout.
        group: data × context parallel.
    """
    deltas = tuple(token_deltas(batch, score) for batch, score in zip(batches, scores, strict=True))
    (sums,) = per_sample(batches, [delta[None] for delta in deltas], len(lengths), group=group)
    return Mismatch(deltas=deltas, sums=sums, lengths=torch.tensor(lengths, device=sums.device))


def mismatch_metrics(
    mismatch: Mismatch, batches: Sequence[MicroBatch], *, group: dist.ProcessGroup
) -> dict[str, float]:
    """Over all tokens of a rollout whose Δ is finite. Collective.

    Returns:
        ``rollout/logprob_abs_diff/mean`` and ``/max``: |Δ| of a token, nats;
        ``rollout/kl_k1`` and ``rollout/kl_k3``: KL(sampler ‖ trainer) per token, in two estimates, -Δ and
        exp(Δ) - 1 - Δ;
        ``rollout/mismatch_sigma``: spread of Σ Δ / √L over responses, beside ``fspo/sigma_hat``.
    """
    totals = mismatch.sums.new_zeros(4)  # |Δ|, -Δ, exp(Δ) - 1 - Δ, tokens
    largest = 0.0
    for batch, delta in zip(batches, mismatch.deltas, strict=True):
        counted = delta[batch.mask & delta.isfinite()]
        totals += torch.stack(
            [
                counted.abs().sum(),
                -counted.sum(),
                (counted.expm1() - counted).sum(),
                counted.new_tensor(len(counted)),
            ]
        )
        largest = max(largest, counted.abs().max().item() if len(counted) else 0.0)
    names = ("rollout/logprob_abs_diff/mean", "rollout/kl_k1", "rollout/kl_k3")
    metrics = reduce_metrics(
        {name: torch.stack([total, totals[3]]) for name, total in zip(names, totals[:3], strict=True)},
        group=group,
    )
    metrics["rollout/logprob_abs_diff/max"] = max(gather_lists([largest], group=group))
    known = mismatch.sums.isfinite() & (mismatch.lengths > 0)
    spread = sigma_hat(mismatch.sums, mismatch.lengths, 0.5) if known.any() else math.nan
    return metrics | {"rollout/mismatch_sigma": spread}
