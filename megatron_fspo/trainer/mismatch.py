"""The mismatch Δ = log π_trainer − log π_sampler of the sampled tokens, and an alarm.

Different kernels and precisions cause small noise in Δ, whose sum over a response spreads as √L, like S. For
responses from older weights, Δ also contains the weight updates since. A bias or much more noise is an error.
The alarm checks only tokens from the trainer's current weights. It recognises a cut vocabulary (top-p,
top-k), renormalised: Δ is then the log of the kept probability, so never above 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.config import Config
from megatron_fspo.objective.calibration import sigma_hat
from megatron_fspo.packing.batch import MicroBatch
from megatron_fspo.parallel.groups import ParallelGroups, broadcast_first, gather_lists, means, sum_metrics
from megatron_fspo.parallel.segments import ExactSums
from megatron_fspo.trainer.rollout import Rollout

OUTLIER = 6.0
"""A response is an outlier if |Σ Δ| / √L exceeds this many σ̂. For Gaussian noise this is a share of 2e-9, and
0.3% even if σ̂, a median of few responses, is only half of σ."""

LIMIT = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Default alarm limit for the mean |Δ|, in nats. Others report 0.011 for Megatron and vLLM in bfloat16."""

FP8_LIMIT = 0.3
"""Default limit for a trainer in FP8 and a sampler in bfloat16. With emulated FP8 the mean |Δ| was 0.015 in
training on make-sum, and 0.22 for responses of SmolLM2-135M."""

_LEAST_KEPT = 0.5
"""Assumed least probability that an unrequested top-p or top-k cut keeps; hardly any token keeps less."""
_EXCEPTIONS = 0.01
"""Share of tokens that noise may move out of the range of a cut vocabulary."""


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Δ of the scored responses of one rollout."""

    sums: Tensor
    """[samples] Σ Δ over each response, on every rank; not finite if a token's Δ is not."""
    lengths: Tensor
    """[samples] response lengths; 0 for a response that was not scored."""
    metrics: dict[str, float]
    """See :func:`measure`."""


def token_deltas(batch: MicroBatch, score: Tensor | None = None) -> Tensor:
    """Return Δ [t] of a micro-batch's tokens in float64; 0 outside the mask. ``score`` [t] replaces its old
    log-probs."""
    score = batch.old_log_probs if score is None else score
    assert score is not None
    return torch.where(batch.loss_mask, (score - batch.sampled_log_probs).double(), 0.0)


def per_sample(
    batches: Iterable[MicroBatch],
    columns: Callable[[MicroBatch], Tensor],
    count: int,
    samples: int,
    *,
    group: dist.ProcessGroup,
) -> Tensor:
    """Sum per-token values over whole responses: [count, samples] in float64 on every rank. Collective.

    Sums are exact up to one rounding: bit-identical on all ranks, and for any split into ranks and packs.
    ``columns`` returns values [count, t] of a micro-batch; ``group`` is data × context parallel.
    """
    sums = None
    for batch in batches:
        sums = sums or ExactSums(count, samples, device=batch.loss_mask.device)
        segment = batch.segment.index_select(0, batch.rows)
        sums.add(columns(batch).index_select(1, batch.rows), batch.sample_index.index_select(0, segment))
    assert sums is not None, "every rank has micro-batches"
    return sums.total(group)


def measure(
    batches: Sequence[MicroBatch],
    samples: int,
    *,
    group: dist.ProcessGroup,
    also: Callable[[MicroBatch, Tensor], None] = lambda batch, delta: None,
) -> Mismatch:
    """Compare the log-probs of the old pass with the sampler's. Collective.

    Args:
        batches: this rank's micro-batches, with the log-probs of the old pass.
        samples: number of responses of the whole rollout.
        group: data × context parallel.
        also: called with each micro-batch and its Δ [t]; each loop over packs collates them again.

    Returns:
        the mismatch, with metrics over all tokens with finite Δ: ``rollout/logprob_abs_diff/mean`` and
        ``/max``: |Δ| of a token, nats; ``rollout/kl_k1`` and ``rollout/kl_k3``: the estimates −Δ and
        exp(Δ) − 1 − Δ of KL(sampler ‖ trainer) per token; ``rollout/mismatch_sigma``: spread of Σ Δ / √L over
        responses, to compare with ``fspo/sigma_hat``; ``rollout/mismatch_outliers``: :func:`outlier_share`.
    """
    totals: list[Tensor] = []  # per micro-batch: [4] Σ of |Δ|, −Δ, exp(Δ) − 1 − Δ and 1
    largest: list[Tensor] = []
    scored: list[tuple[Tensor, Tensor]] = []

    def columns(batch: MicroBatch) -> Tensor:
        delta = token_deltas(batch)
        known = delta.isfinite()
        finite = torch.where(known, delta, 0.0)
        largest.append(finite.abs().amax())
        finite = finite[batch.rows]
        rows = (finite.abs(), -finite, finite.expm1() - finite, known[batch.rows].double())
        totals.append(torch.stack([row.sum() for row in rows]))
        also(batch, delta)
        scored.append((batch.sample_index, batch.lengths))
        return delta[None]

    (whole,) = per_sample(batches, columns, 1, samples, group=group)
    numbers, scored_lengths = (torch.cat(column) for column in zip(*scored, strict=True))
    lengths = scored_lengths.new_zeros(samples).index_copy_(0, numbers, scored_lengths)
    if group.size() > 1:  # all ranks that share a response have its length
        dist.all_reduce(lengths, op=dist.ReduceOp.MAX, group=group)
    names = ("rollout/logprob_abs_diff/mean", "rollout/kl_k1", "rollout/kl_k3")
    parts = [{name: torch.stack([s[i], s[3]]) for i, name in enumerate(names)} for s in totals]
    metrics = means(sum_metrics(parts, group=group))
    metrics["rollout/logprob_abs_diff/max"] = max(gather_lists(torch.stack(largest).tolist(), group=group))
    sums_here, lengths_here = whole.cpu(), lengths.cpu()
    known = sums_here.isfinite() & (lengths_here > 0)
    spread = sigma_hat(sums_here[known], lengths_here[known], 0.5) if known.any() else math.nan
    metrics["rollout/mismatch_sigma"] = spread
    metrics["rollout/mismatch_outliers"] = outlier_share(sums_here, lengths_here, spread)
    return Mismatch(sums=whole, lengths=lengths, metrics=metrics)


def outlier_share(sums: Tensor, lengths: Tensor, sigma: float) -> float:
    """Return the share of responses with much more than the usual noise, |Σ Δ| > 6·σ̂·√L; NaN without any.

    As σ̂ is a median, it hardly shows errors in a minority of responses: with 100 times the noise in 15% of
    them it grows by a fifth. Source: ours.

    Args:
        sums: Σ Δ [N] in nats; non-finite values are ignored.
        lengths: L [N], response tokens; responses with L = 0 are ignored.
        sigma: σ̂ of these responses, nats per √token.
    """
    known = sums.isfinite() & (lengths > 0)
    limit = OUTLIER * sigma * lengths[known].double().sqrt()
    return (sums[known].abs() > limit).double().mean().item()


@dataclass(kw_only=True)
class MismatchAlarm:
    """Checks the mean |Δ| over tokens from the current weights.

    Call :meth:`add` with every micro-batch, then :meth:`check`.
    """

    fresh: Tensor
    """[samples] position in prompt and response after which all tokens are from the current weights; on the
    device of the micro-batches."""
    version: int
    """Version of the current weights."""
    top_p: float
    limit: float
    """Largest accepted mean |Δ|, nats."""
    groups: ParallelGroups

    _added: list[Tensor] = field(init=False, default_factory=list)
    """Per micro-batch: [4] Σ |Δ|, tokens outside the range, tokens, and the largest |Δ|; on the device."""

    def add(self, batch: MicroBatch, delta: Tensor) -> None:
        """Add a micro-batch with its Δ [t] from :func:`token_deltas`; non-finite values are ignored."""
        floor = math.log(self.top_p if self.top_p < 1 else _LEAST_KEPT)
        fresh = self.fresh[batch.sample_index]
        first = torch.cat([fresh, fresh.new_zeros(1)]).index_select(0, batch.segment)
        used = batch.loss_mask & (batch.position_ids[0] >= first) & delta.isfinite()
        beyond = used & ((delta > self.limit) | (delta < floor - self.limit))
        size = torch.where(used, delta, 0.0).abs()
        sums = [size.sum(), *(x.sum().double() for x in (beyond, used)), size.amax()]
        self._added.append(torch.stack(sums))

    def check(self) -> tuple[dict[str, float], str | None]:
        """Check the rollout. Collective.

        Returns ``rollout/mismatch_alarm``: 1 or 0, NaN if no token is from the current weights; and if it is
        1, a warning with likely causes, else None.
        """
        added = torch.stack(self._added)
        totals, groups = added[:, :3].sum(0), self.groups
        if groups.dp_cp.size() > 1:
            dist.all_reduce(totals, group=groups.dp_cp)
        # The first rank's sums, as they decide control flow.
        total, beyond, count = broadcast_first(totals, groups.dp_cp, groups.tp, groups.pp).tolist()
        if not count:
            return {"rollout/mismatch_alarm": math.nan}, None
        if total / count <= self.limit:
            return {"rollout/mismatch_alarm": 0.0}, None
        largest = max(gather_lists(added[:, 3].tolist(), group=self.groups.dp_cp))
        cause = (
            "log-probs before the temperature (a server without --logprobs-mode processed_logprobs) or at "
            "another one, other weights than claimed (see rollout/canary_abs_diff), or other kernels"
        )
        if beyond <= _EXCEPTIONS * count:
            why = "but rollout.top_p is 1: check the server's sampling defaults"
            if self.top_p < 1:
                why = f"expected with rollout.top_p = {self.top_p:g}, as the old pass does not apply the cut"
            cause = f"a vocabulary cut by top-p or top-k, and log-probs renormalised over the rest; {why}"
        text = (
            f"sampler and trainer differ by {total / count:.2g} nats per token (at most {largest:.2g}) over "
            f"{count:,.0f} tokens of the current weights, version {self.version}; "
            f"rollout.mismatch_limit is {self.limit:g}. Likely cause: {cause}"
        )
        return {"rollout/mismatch_alarm": 1.0}, text


def make_alarm(
    config: Config,
    rollout: Rollout,
    version: int,
    groups: ParallelGroups,
    dtype: torch.dtype,
    device: torch.device,
) -> MismatchAlarm:
    """Return the alarm for responses and the current weight ``version``; its default limit depends on the
    precision."""
    usual = FP8_LIMIT if config.fp8.recipe != "none" else LIMIT[dtype]
    return MismatchAlarm(
        fresh=rollout.fresh_from(version).to(device),
        version=version,
        top_p=config.rollout.top_p,
        limit=config.rollout.mismatch_limit or usual,
        groups=groups,
    )
