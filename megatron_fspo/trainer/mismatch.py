"""How far the sampler's log-probs are from the trainer's: Δ = log π_trainer - log π_sampler, token by token.

It would be 0 if both computed alike. Other kernels and precisions make small noise; its sum over a response
spreads as √L, as S does. A bias, or much more, is a fault: stale weights, another temperature or top-p,
log-probs before the temperature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.objective import sigma_hat
from megatron_fspo.packing.batch import MicroBatch
from megatron_fspo.parallel.metrics import gather_lists, reduce_metrics


def mismatch_metrics(
    micro_batches: Sequence[MicroBatch],
    scores: Sequence[Tensor],
    lengths: Sequence[int],
    *,
    group: dist.ProcessGroup,
    device: torch.device,
) -> dict[str, float]:
    """Over all tokens of a rollout whose Δ is finite. Collective.

    Args:
        micro_batches, scores: this rank's, and the old pass's log-probs of their labels, [t] each.
        lengths: response lengths of all samples of the rollout.
        group: data × context parallel.

    Returns:
        ``rollout/logprob_abs_diff/mean`` and ``/max``: |Δ| of a token, nats;
        ``rollout/kl_k1`` and ``rollout/kl_k3``: KL(sampler ‖ trainer) per token, in two estimates, -Δ and
        exp(Δ) - 1 - Δ;
        ``rollout/mismatch_sigma``: spread of Σ Δ / √L over responses, beside ``fspo/sigma_hat``.
    """
    totals = torch.zeros(4, dtype=torch.float64, device=device)  # |Δ|, -Δ, exp(Δ) - 1 - Δ, tokens
    sums = torch.zeros(len(lengths), dtype=torch.float64, device=device)
    largest = 0.0
    for batch, score in zip(micro_batches, scores, strict=True):
        delta = (score - batch.sampled_log_probs).double()
        counts = batch.mask & delta.isfinite()
        sums.index_add_(0, batch.sample_index[batch.segment[counts]], delta[counts])
        delta = delta[counts]
        totals += torch.stack(
            [delta.abs().sum(), -delta.sum(), (delta.expm1() - delta).sum(), counts.sum().double()]
        )
        largest = max(largest, delta.abs().max().item() if delta.numel() else 0.0)
    names = ("rollout/logprob_abs_diff/mean", "rollout/kl_k1", "rollout/kl_k3")
    metrics = reduce_metrics(
        {name: torch.stack([total, totals[3]]) for name, total in zip(names, totals[:3], strict=True)},
        group=group,
    )
    metrics["rollout/logprob_abs_diff/max"] = max(gather_lists([largest], group=group))
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
    known = torch.tensor(lengths, device=device)
    answered = known > 0
    spread = sigma_hat(sums[answered], known[answered], 0.5) if answered.any() else math.nan
    return metrics | {"rollout/mismatch_sigma": float(spread)}
