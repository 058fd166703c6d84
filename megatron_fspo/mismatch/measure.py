"""How far the sampler's log-probs are from the trainer's: Δ = log π_trainer - log π_sampler, token by token.

It would be 0 if both computed alike. Other kernels and precisions make small noise; its sum over a response
spreads as √L, as S does. A bias, or much more, is a fault (see :mod:`.alarm`), or older weights: responses
that were sampled before the last updates differ by what those changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.objective.calibration import sigma_hat
from megatron_fspo.packing.batch import MicroBatch
from megatron_fspo.parallel.metrics import gather_lists, reduce_metrics
from megatron_fspo.parallel.segments import ExactSums

OUTLIER = 6.0
"""An outlier's |Σ Δ| / √L, in σ̂. Of Gaussian noise 2e-9 are beyond it, and 0.3 % even where σ̂, the median of
a few responses, comes out at half of σ."""


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Δ of the scored responses of one rollout."""

    sums: Tensor
    """[samples] Σ Δ over the whole response, on every rank; not finite where a token's Δ is not."""
    lengths: Tensor
    """[samples] response lengths; 0 for a response that was not scored."""
    metrics: dict[str, float]
    """See :func:`measure`."""


def token_deltas(batch: MicroBatch, score: Tensor | None = None) -> Tensor:
    """Δ [t] in float64 of a micro-batch scored by the trainer; 0 outside the mask.

    Args:
        score: log-probs [t] in place of the batch's old ones.
    """
    score = batch.old_log_probs if score is None else score
    assert score is not None
    return torch.where(batch.mask, (score - batch.sampled_log_probs).double(), 0.0)


def per_sample(
    batches: Iterable[MicroBatch],
    columns: Callable[[MicroBatch], Tensor],
    count: int,
    samples: int,
    *,
    group: dist.ProcessGroup,
) -> Tensor:
    """Per-token numbers added up over whole responses, wherever their tokens lie. Collective.

    Exact up to one rounding: the same bits on every rank, whatever the split into ranks and micro-batches.

    Args:
        batches: this rank's.
        columns: of a micro-batch, [count, t].
        samples: of the whole rollout.
        group: data × context parallel.

    Returns:
        [count, samples] float64, on every rank.
    """
    sums = None
    for batch in batches:
        sums = sums or ExactSums(count, samples, device=batch.mask.device)
        here = batch.mask.nonzero()[:, 0]
        segment = batch.segment.index_select(0, here)
        sums.add(columns(batch).index_select(1, here), batch.sample_index.index_select(0, segment))
    assert sums is not None, "every rank has micro-batches"
    return sums.total(group)


def measure(
    batches: Sequence[MicroBatch],
    samples: int,
    *,
    group: dist.ProcessGroup,
    also: Callable[[MicroBatch, Tensor], None] = lambda batch, delta: None,
) -> Mismatch:
    """Compare the old pass with the sampler. Collective.

    Args:
        batches: this rank's, with the old pass's log-probs.
        samples: of the whole rollout.
        group: data × context parallel.
        also: is shown every micro-batch with its Δ [t], as each is made anew for every walk over them.

    Returns:
        with metrics over all tokens whose Δ is finite: ``rollout/logprob_abs_diff/mean`` and ``/max``: |Δ| of
        a token, nats; ``rollout/kl_k1`` and ``rollout/kl_k3``: KL(sampler ‖ trainer) per token, in two
        estimates, -Δ and exp(Δ) - 1 - Δ; ``rollout/mismatch_sigma``: spread of Σ Δ / √L over responses,
        beside ``fspo/sigma_hat``; ``rollout/mismatch_outliers``: see :func:`outlier_share`.
    """
    totals = _Totals()
    scored: list[tuple[Tensor, Tensor]] = []

    def columns(batch: MicroBatch) -> Tensor:
        delta = token_deltas(batch)
        totals.add(delta[batch.mask & delta.isfinite()])
        also(batch, delta)
        scored.append((batch.sample_index, batch.lengths))
        return delta[None]

    (whole,) = per_sample(batches, columns, 1, samples, group=group)
    lengths = _everywhere(scored, samples, group=group)
    names = ("rollout/logprob_abs_diff/mean", "rollout/kl_k1", "rollout/kl_k3")
    metrics = reduce_metrics(
        {name: torch.stack([total, totals.count]) for name, total in zip(names, totals.sums, strict=True)},
        group=group,
    )
    metrics["rollout/logprob_abs_diff/max"] = max(gather_lists([totals.largest], group=group))
    known = whole.isfinite() & (lengths > 0)
    spread = sigma_hat(whole[known], lengths[known], 0.5) if known.any() else math.nan
    metrics["rollout/mismatch_sigma"] = spread
    metrics["rollout/mismatch_outliers"] = outlier_share(whole, lengths, spread)
    return Mismatch(sums=whole, lengths=lengths, metrics=metrics)


def outlier_share(sums: Tensor, lengths: Tensor, sigma: float) -> float:
    """Share of responses that differ by far more than the usual noise: |Σ Δ| > 6·σ̂·√L.

    σ̂ is a median, so it says how the usual response differs, and nothing of a minority: with 100 times the
    noise in 15 % of the responses it grows by a fifth. Source: ours.

    Args:
        sums: Σ Δ [N] in nats. Non-finite ones are left out.
        lengths: L [N], response tokens. Responses with L = 0 are left out.
        sigma: σ̂ of these responses, nats per √token.

    Returns:
        NaN where no response is left.
    """
    known = sums.isfinite() & (lengths > 0)
    limit = OUTLIER * sigma * lengths[known].double().sqrt()
    return (sums[known].abs() > limit).double().mean().item()


def _everywhere(scored: Sequence[tuple[Tensor, Tensor]], samples: int, *, group: dist.ProcessGroup) -> Tensor:
    """Lengths [samples] of the responses that some rank scored, 0 for the others. Collective."""
    numbers, lengths = (torch.cat(column) for column in zip(*scored, strict=True))
    found = lengths.new_zeros(samples).index_copy_(0, numbers, lengths)
    if group.size() > 1:
        # Ranks that share a response all have its length.
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return found


class _Totals:
    """Over this rank's finite Δ."""

    def __init__(self) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64)
        """Of |Δ|, -Δ, exp(Δ) - 1 - Δ."""
        self.count = torch.zeros((), dtype=torch.float64)
        self.largest = 0.0

    def add(self, delta: Tensor) -> None:
        """Δ of some tokens."""
        parts = (delta.abs(), -delta, delta.expm1() - delta)
        self.sums = self.sums.to(delta) + torch.stack([part.sum() for part in parts])
        self.count = self.count.to(delta) + len(delta)
        self.largest = max(self.largest, delta.abs().max().item() if len(delta) else 0.0)
