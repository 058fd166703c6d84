"""The difference of sampler and trainer, Δ = log π_trainer - log π_sampler of the same tokens, and why.

It would be 0 if both computed alike. Other kernels and precisions make small noise; its sum over a response
spreads as √L, as S does. Responses that were sampled before the last updates differ by what those changed. A
bias, or much more noise, is a fault: the alarm looks at tokens of the trainer's present weights only, and
names the likeliest cause. Each is a test that the others fail:

* log-probs before the temperature, or at another one: scored at that temperature, the difference vanishes;
* a cut vocabulary (top-p, top-k), renormalised: Δ is the log of the mass kept, so never above 0;
* none of these: other weights than claimed, or other kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.objective.calibration import sigma_hat
from megatron_fspo.packing.batch import MicroBatch, Packs
from megatron_fspo.parallel.groups import ParallelGroups, gather_lists, means, of_first_rank, sum_metrics
from megatron_fspo.parallel.segments import ExactSums

OUTLIER = 6.0
"""An outlier's |Σ Δ| / √L, in σ̂. Of Gaussian noise 2e-9 are beyond it, and 0.3 % even where σ̂, the median of
a few responses, comes out at half of σ."""

LIMIT = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Largest mean |Δ| of a sound run, in nats. Others report 0.011 between Megatron and vLLM in bfloat16."""

FP8_LIMIT = 0.3
"""The same between a trainer in FP8 and a sampler in bfloat16. Emulated: 0.015 in training on make-sum, 0.22
for responses of SmolLM2-135M."""

_LEAST_KEPT = 0.5
"""Probability kept by a cut vocabulary that nobody asked for; less at hardly any token."""
_EXCEPTIONS = 0.01
"""Share of tokens that may break a rule which noise blurs."""
_PASSES = 6
"""Passes of the search for another temperature."""


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
    """Δ [t] in float64 of a micro-batch with old and sampled log-probs; 0 outside the mask. ``score`` [t] is
    in place of the old ones."""
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

    ``columns`` makes [count, t] of a micro-batch of this rank; the ``group`` is data × context parallel.

    Returns:
        [count, samples] float64 of the whole rollout, on every rank.
    """
    sums = None
    for batch in batches:
        sums = sums or ExactSums(count, samples, device=batch.mask.device)
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
    """Compare the old pass with the sampler. Collective.

    Args:
        batches: this rank's, with the old pass's log-probs.
        samples: of the whole rollout.
        group: data × context parallel.
        also: is shown every micro-batch with its Δ [t], as each is made anew in every loop over them.

    Returns:
        with metrics over all tokens whose Δ is finite: ``rollout/logprob_abs_diff/mean`` and ``/max``: |Δ| of
        a token, nats; ``rollout/kl_k1`` and ``rollout/kl_k3``: KL(sampler ‖ trainer) per token, in two
        estimates, -Δ and exp(Δ) - 1 - Δ; ``rollout/mismatch_sigma``: spread of Σ Δ / √L over responses,
        beside ``fspo/sigma_hat``; ``rollout/mismatch_outliers``: see :func:`outlier_share`.
    """
    totals: list[Tensor] = []  # of each micro-batch, [4] Σ of |Δ|, -Δ, exp(Δ) - 1 - Δ and 1
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
    if group.size() > 1:  # ranks that share a response all have its length
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


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Δ over some tokens, over all ranks; the same on every rank."""

    tokens: int
    mean: float
    """Mean |Δ|; NaN without tokens."""
    largest: float
    beyond: float
    """Share of tokens with Δ outside what a cut vocabulary can give."""


@dataclass(kw_only=True)
class MismatchAlarm:
    """The gap over the tokens of the present weights, under construction, and what it means.

    Give it every micro-batch by :meth:`add`, then :meth:`check`.
    """

    fresh: Tensor
    """[samples] position in prompt and response from which on all that follows was sampled by the present
    weights; on the device of the micro-batches."""
    version: int
    """Version of these weights."""
    temperature: float
    top_p: float
    limit: float
    """Largest mean |Δ|, nats."""
    rescore: Callable[[Packs, float], list[Tensor]]
    """Log-probs [t] of micro-batches at another temperature; collective."""
    probe: int
    """Micro-batches of this rank to score again, the first ones."""
    groups: ParallelGroups

    _added: list[Tensor] = field(init=False, default_factory=list)
    """Of each micro-batch, [4] Σ |Δ|, tokens beyond, tokens, and the largest |Δ|; on the device."""

    def add(self, batch: MicroBatch, delta: Tensor) -> None:
        """Add a micro-batch, with Δ [t] of :func:`token_deltas`; what is not finite does not count."""
        floor = math.log(self.top_p if self.top_p < 1 else _LEAST_KEPT)
        used = self._chosen(batch) & delta.isfinite()
        beyond = used & ((delta > self.limit) | (delta < floor - self.limit))
        size = torch.where(used, delta, 0.0).abs()
        self._added.append(
            torch.stack([size.sum(), *(x.sum().double() for x in (beyond, used)), size.amax()])
        )

    def check(self, batches: Packs) -> tuple[dict[str, float], str | None]:
        """Judge one rollout. Collective; scores a few micro-batches again if something is wrong.

        Args:
            batches: this rank's, with the old pass's log-probs; each was added.

        Returns:
            ``rollout/mismatch_alarm``: 1 or 0, NaN where the present weights sampled nothing; and a warning
            with the likeliest cause, if there is one.
        """
        gap = self._gap()
        if not gap.tokens:
            return {"rollout/mismatch_alarm": math.nan}, None
        if gap.mean <= self.limit:
            return {"rollout/mismatch_alarm": 0.0}, None
        text = (
            f"sampler and trainer differ by {gap.mean:.2g} nats per token (at most {gap.largest:.2g}) over "
            f"{gap.tokens:,} tokens of the present weights, version {self.version}; "
            f"rollout.mismatch_limit is {self.limit:g}. "
            f"Likeliest cause: {self._cause(batches[: self.probe], gap)}"
        )
        return {"rollout/mismatch_alarm": 1.0}, text

    def _cause(self, batches: Packs, gap: Gap) -> str:
        """Return the likeliest cause of the gap, with its evidence. Collective."""
        other = self._other_temperature(batches)
        if other is not None:
            what = (
                "log-probs before the temperature (a server without --logprobs-mode processed_logprobs), or "
                "a sampler that ignores it"
                if other == 1
                else "another temperature"
            )
            return (
                f"{what}: scored at {other:.3g} instead of rollout.temperature = {self.temperature:g}, the "
                "difference vanishes"
            )
        if gap.beyond <= _EXCEPTIONS:
            why = (
                f"expected with rollout.top_p = {self.top_p:g}, as the old pass ignores the cut"
                if self.top_p < 1
                else "but rollout.top_p is 1: look for sampling defaults of the server"
            )
            return f"a vocabulary cut by top-p or top-k, and log-probs renormalised over the rest; {why}"
        return (
            "other weights than claimed, or other kernels: no temperature explains it, nor a cut vocabulary "
            "(see rollout/canary_abs_diff)"
        )

    def _other_temperature(self, batches: Packs) -> float | None:
        """Return the temperature at which the difference vanishes, 1 before any other; None: there is none.
        Collective.

        Log-probs are smooth in β = 1/T: Gauss-Newton on Σ Δ², with the derivative from the last two passes.
        """
        scores = [batch.old_log_probs for batch in batches if batch.old_log_probs is not None]
        # Within the limit, and not by a hair's breadth.
        enough = min(self.limit, self._mean(batches, scores) / 4)
        beta = 1 / self.temperature
        following = 1.0 if beta != 1 else 0.9
        for _ in range(_PASSES):
            before, before_scores = beta, scores
            beta = following
            scores = self.rescore(batches, 1 / beta)
            if self._mean(batches, scores) <= enough:
                return 1 / beta
            totals = scores[0].new_zeros(2, dtype=torch.float64)
            for batch, old, new in zip(batches, before_scores, scores, strict=True):
                delta = token_deltas(batch, new)
                slope = (new.double() - old.double()) / (beta - before)
                used = self._chosen(batch) & delta.isfinite() & slope.isfinite()
                slope, delta = (torch.where(used, x, 0.0) for x in (slope, delta))
                totals += torch.stack([(slope * delta).sum(), slope.square().sum()])
            up, down = self._summed(totals)
            step = -up / down if down > 0 else 0.0
            # A wrong derivative must not throw it out of reach.
            following = min(max(beta + step, beta / 3), beta * 3)
            if not abs(following - beta) > 1e-9:
                return None
        return None

    def _mean(self, batches: Sequence[MicroBatch], scores: Sequence[Tensor]) -> float:
        """Return the mean |Δ| of these micro-batches with these log-probs in place of the old ones.
        Collective."""
        again = replace(self)
        for batch, score in zip(batches, scores, strict=True):
            again.add(batch, token_deltas(batch, score))
        return again._gap().mean

    def _gap(self) -> Gap:
        """Sum up over all ranks. Collective."""
        added = torch.stack(self._added)
        total, beyond, count = self._summed(added[:, :3].sum(0))
        return Gap(
            tokens=int(count),
            mean=total / count if count else math.nan,
            largest=max(gather_lists(added[:, 3].tolist(), group=self.groups.dp_cp)),
            beyond=beyond / count if count else math.nan,
        )

    def _chosen(self, batch: MicroBatch) -> Tensor:
        """[t] bool: response tokens that the present weights sampled."""
        first = self.fresh[batch.sample_index]
        first = torch.cat([first, first.new_zeros(1)]).index_select(0, batch.segment)
        return batch.mask & (batch.position_ids[0] >= first)

    def _summed(self, totals: Tensor) -> list[float]:
        """Sum over all ranks with different tokens: the first rank's sums, as what follows is collective."""
        groups = self.groups
        if groups.dp_cp.size() > 1:
            dist.all_reduce(totals, group=groups.dp_cp)
        numbers: list[float] = of_first_rank(totals, groups.dp_cp, groups.tp, groups.pp).tolist()
        return numbers
