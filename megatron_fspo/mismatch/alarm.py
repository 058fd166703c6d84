"""An alarm when sampler and trainer differ more than kernels and precision explain, with the likeliest cause.

Only tokens of the trainer's present weights are looked at: with older ones Δ includes what the updates since
have changed (the trainer stops where weights are older than allowed). Each cause is a test that the others
fail:

* log-probs before the temperature, or at another one: scored at that temperature, the difference vanishes;
* a cut vocabulary (top-p, top-k), renormalised: Δ is the log of the mass kept, so never above 0;
* none of these: other weights than claimed, or other kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.mismatch.measure import token_deltas
from megatron_fspo.packing.batch import MicroBatch
from megatron_fspo.parallel.groups import ParallelGroups, of_first_rank
from megatron_fspo.parallel.metrics import gather_lists

LIMIT = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Largest mean |Δ| of a sound run, in nats. Others report 0.011 between Megatron and vLLM in bfloat16."""

FP8_LIMIT = 0.3
"""The same between a trainer in FP8 and a sampler in bfloat16. Emulated: 0.015 in training on make-sum, 0.22
for responses of SmolLM2-135M."""

_LEAST_KEPT = 0.5
"""Of the probability, by a cut vocabulary that nobody asked for; less at hardly any token."""
_EXCEPTIONS = 0.01
"""Share of tokens that may break a rule which noise blurs."""
_PASSES = 6
"""Of the search for another temperature."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the run asked for, and what it has at hand."""

    version: int
    """Of the trainer's weights."""
    temperature: float
    top_p: float
    limit: float
    """Largest mean |Δ|, nats."""
    rescore: Callable[[Sequence[MicroBatch], float], list[Tensor]]
    """Log-probs [t] of micro-batches at another temperature; collective."""
    probe: int
    """Micro-batches of this rank to score again, the first ones."""
    groups: ParallelGroups
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Δ over some tokens, over all ranks; the same on every rank."""

    tokens: int
    mean: float
    """Of |Δ|; NaN without tokens."""
    largest: float
    beyond: float
    """Share of tokens with Δ outside what a cut vocabulary can give."""


class FreshTokens:
    """The gap over fresh tokens, under construction: for :func:`check_mismatch`.

    Args:
        fresh: [samples] position in prompt and response from which on all that follows was sampled by the
            present weights.
    """

    def __init__(self, fresh: Tensor, setting: Setting) -> None:
        self.fresh = fresh.to(setting.device)
        self._setting = setting
        self._totals = torch.zeros(3, dtype=torch.float64, device=setting.device)
        self._largest = 0.0

    def add(self, batch: MicroBatch, delta: Tensor) -> None:
        """A micro-batch, with Δ [t] of :func:`token_deltas`; what is not finite does not count."""
        setting = self._setting
        floor = math.log(setting.top_p if setting.top_p < 1 else _LEAST_KEPT)
        used = delta[_chosen(batch, self.fresh) & delta.isfinite()]
        beyond = (used > setting.limit) | (used < floor - setting.limit)
        self._totals += torch.stack([used.abs().sum(), beyond.sum().double(), used.new_tensor(len(used))])
        self._largest = max(self._largest, used.abs().max().item() if len(used) else 0.0)

    def gap(self) -> Gap:
        """Over all ranks. Collective."""
        total, beyond, count = _summed(self._totals, self._setting.groups)
        return Gap(
            tokens=int(count),
            mean=total / count if count else math.nan,
            largest=max(gather_lists([self._largest], group=self._setting.groups.dp_cp)),
            beyond=beyond / count if count else math.nan,
        )


def check_mismatch(
    batches: Sequence[MicroBatch], seen: FreshTokens, setting: Setting
) -> tuple[dict[str, float], str | None]:
    """Look at one rollout. Collective; scores a few micro-batches again if something is wrong.

    Args:
        batches: this rank's, with the old pass's log-probs.
        seen: all of these micro-batches.

    Returns:
        ``rollout/mismatch_alarm``: 1 or 0, NaN where the present weights sampled nothing; and what to tell
        the user, if anything.
    """
    gap = seen.gap()
    if not gap.tokens:
        return {"rollout/mismatch_alarm": math.nan}, None
    if gap.mean <= setting.limit:
        return {"rollout/mismatch_alarm": 0.0}, None
    text = (
        f"sampler and trainer differ by {gap.mean:.2g} nats per token (at most {gap.largest:.2g}) over "
        f"{gap.tokens:,} tokens of the present weights, version {setting.version}; "
        f"rollout.mismatch_limit is {setting.limit:g}. "
        f"Likeliest cause: {find_cause(batches, seen.fresh, gap, setting)}"
    )
    return {"rollout/mismatch_alarm": 1.0}, text


def find_cause(batches: Sequence[MicroBatch], fresh: Tensor, gap: Gap, setting: Setting) -> str:
    """The likeliest cause of a ``gap`` over fresh tokens, with its evidence. Collective."""
    probe = _Probe(batches[: setting.probe], fresh, setting)
    other = find_temperature(probe)
    if other is not None:
        what = (
            "log-probs before the temperature (a server without --logprobs-mode processed_logprobs), or a "
            "sampler that ignores it"
            if other == 1
            else "another temperature"
        )
        return (
            f"{what}: scored at {other:.3g} instead of rollout.temperature = {setting.temperature:g}, the "
            "difference vanishes"
        )
    if gap.beyond <= _EXCEPTIONS:
        told = (
            f"expected with rollout.top_p = {setting.top_p:g}, as the old pass ignores the cut"
            if setting.top_p < 1
            else "but rollout.top_p is 1: look for sampling defaults of the server"
        )
        return f"a vocabulary cut by top-p or top-k, and log-probs renormalised over the rest; {told}"
    return (
        "other weights than claimed, or other kernels: no temperature explains it, nor a cut vocabulary (see "
        "rollout/canary_abs_diff_max)"
    )


def find_temperature(probe: _Probe) -> float | None:
    """The temperature at which the difference vanishes, 1 before any other; None: there is none. Collective.

    Log-probs are smooth in β = 1/T: Gauss-Newton on Σ Δ², with the derivative from the last two passes.
    """
    beta, scores = 1 / probe.setting.temperature, probe.scores
    following = 1.0 if beta != 1 else 0.9
    for _ in range(_PASSES):
        before, before_scores = beta, scores
        beta = following
        scores = probe.score(1 / beta)
        if probe.explained(scores):
            return 1 / beta
        step = probe.newton_step(before_scores, scores, beta - before)
        # A wrong derivative must not throw it out of reach.
        following = min(max(beta + step, beta / 3), beta * 3)
        if not abs(following - beta) > 1e-9:
            return None
    return None


class _Probe:
    """The fresh tokens of a few micro-batches, to be scored again; ``fresh`` as :func:`_chosen` has it."""

    def __init__(self, batches: Sequence[MicroBatch], fresh: Tensor, setting: Setting) -> None:
        self.setting = setting
        self._batches, self._fresh = batches, fresh
        self.scores = [batch.old_log_probs for batch in batches if batch.old_log_probs is not None]
        """At the run's temperature."""
        self._before = _gap(batches, None, fresh, setting).mean

    def score(self, temperature: float) -> list[Tensor]:
        """Log-probs [t] at another temperature."""
        return self.setting.rescore(self._batches, temperature)

    def explained(self, scores: Sequence[Tensor]) -> bool:
        """Whether the difference vanishes with these: within the limit, and not by a hair's breadth."""
        gap = _gap(self._batches, scores, self._fresh, self.setting)
        return gap.mean <= min(self.setting.limit, self._before / 4)

    def newton_step(self, before: Sequence[Tensor], scores: Sequence[Tensor], change: float) -> float:
        """-Σ d·Δ / Σ d², d the derivative of a log-prob; ``change`` of 1/T lies between the two passes."""
        totals = scores[0].new_zeros(2, dtype=torch.float64)
        for batch, old, new in zip(self._batches, before, scores, strict=True):
            delta = token_deltas(batch, new)
            slope = (new.double() - old.double()) / change
            used = _chosen(batch, self._fresh) & delta.isfinite() & slope.isfinite()
            totals += torch.stack([(slope * delta)[used].sum(), slope[used].square().sum()])
        up, down = _summed(totals, self.setting.groups)
        return -up / down if down > 0 else 0.0


def _gap(
    batches: Sequence[MicroBatch], scores: Sequence[Tensor] | None, fresh: Tensor, setting: Setting
) -> Gap:
    """Over the fresh tokens whose Δ is finite, from the old pass or from other ``scores``. Collective."""
    seen = FreshTokens(fresh, setting)
    for number, batch in enumerate(batches):
        seen.add(batch, token_deltas(batch, None if scores is None else scores[number]))
    return seen.gap()


def _chosen(batch: MicroBatch, fresh: Tensor) -> Tensor:
    """[t] bool: response tokens predicted at a sample's position ``fresh`` [samples] or later."""
    first = fresh[batch.sample_index]
    first = torch.cat([first, first.new_zeros(1)]).index_select(0, batch.segment)
    return batch.mask & (batch.position_ids[0] >= first)


def _summed(totals: Tensor, groups: ParallelGroups) -> list[float]:
    """Over all ranks with different tokens; the first rank's on all, as what follows on it is collective."""
    if groups.dp_cp.size() > 1:
        dist.all_reduce(totals, group=groups.dp_cp)
    numbers: list[float] = of_first_rank(totals, groups.dp_cp, groups.tp, groups.pp).tolist()
    return numbers
