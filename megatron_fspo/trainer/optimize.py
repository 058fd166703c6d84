"""The optimizer steps on one rollout. Each of them consists of:

1. Forward and backward on a mini-batch's micro-batches: gives the gradient and a record of each sequence.
2. Name and count sequences with a non-finite S, up to the share that the run allows.
3. End the run if the policy is too far from the old policy (``optimizer.max_kl``).
4. Skip the step if its gradient is not finite, as a weight of 0 does not stop a NaN inside the network from
   reaching every gradient (0·NaN is NaN); or if it is far larger than recent ones
   (``optimizer.skip_norm_ratio``): clipping would bound the size of the step, but not its direction, and
   Adam's moments would keep it.
5. Update the weights. Then the band of the loss may learn from S.

The weights do not change before 5., even if the run ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from megatron_fspo.config import Config, Optimizer
from megatron_fspo.errors import Diverged, TrainingError
from megatron_fspo.mcore.model.policy import Update
from megatron_fspo.mcore.model.policy_loss import PolicyLoss
from megatron_fspo.objective import SequenceLevel
from megatron_fspo.packing.batch import MicroBatches
from megatron_fspo.parallel.groups import ParallelGroups, Totals, agreed, any_rank, gather_lists, means, share
from megatron_fspo.record.log import RunLog
from megatron_fspo.record.records import Recorder, SequenceRecord, as_tensors
from megatron_fspo.record.tokens import Piece
from megatron_fspo.trainer.batch import TrainingBatch
from megatron_fspo.trainer.rollout import Rollout
from megatron_fspo.trainer.training import State, Training

FEWEST_NORMS = 8
"""Number of past gradient norms required to detect spikes."""
_NAMED = 8
"""Maximum number of responses that a message names."""


@dataclass(frozen=True, kw_only=True)
class OptimizerStep:
    """An optimizer step, taken or skipped."""

    number: int
    """Which one on its rollout, from 1."""
    update: Update
    records: list[SequenceRecord]
    """Records of the sequences of all ranks."""
    num_sequences: int
    """N, sequences of the mini-batch, in micro-batches or not."""
    on_policy: bool
    """True if the policy had not moved since the old pass, so that S = 0."""
    measured: bool
    """True if the band is measured from its records."""
    tokens: list[Piece]
    """Token log-probs of some of the records, for the run folder."""
    routers: Tensor | None
    """Report of its routers; None without experts."""

    @property
    def nonfinite(self) -> list[SequenceRecord]:
        """Records of sequences that were dropped because they are not finite."""
        return [record for record in self.records if record.nonfinite]

    @property
    def moved(self) -> bool:
        """True if it changed the policy."""
        return self.update.grad_norm > 0 and not self.update.skipped


def update(
    run: Training, batch: TrainingBatch, micro_batches: MicroBatches, before: Sequence[OptimizerStep]
) -> OptimizerStep:
    """Take an optimizer step on the ``micro_batches`` of a mini-batch; ``before`` are those already taken
    on the rollout. Collective.

    Raises:
        TrainingError: too many sequences are not finite.
        Diverged: the policy is too far from the old policy, or too many steps in a row were skipped.
    """
    config, state, log = run.inputs.config, run.state, run.log
    device, on_policy = run.inputs.backend.device, batch.on_policy and all(o.update.skipped for o in before)
    number = len(before) + 1
    name = f"step {state.step + 1}, optimizer step {number}"
    kept = 0 if on_policy else config.log.tokens
    objective = state.loss.objective(on_policy=on_policy, update=number)
    drift = objective.band.drift if isinstance(objective, SequenceLevel) else 0.0
    recorder = Recorder(number, every=math.ceil(len(batch.rollout) / kept) if kept else 0, drift=drift)
    loss = PolicyLoss(
        objective=objective,
        scoring=run.scoring,
        entropy_coef=config.loss.entropy_coef,
        kl_coef=config.loss.kl_coef,
        observer=recorder,
    )
    micro_batches, passes = run.policy.with_routers(
        micro_batches,
        replay=config.moe.replay != "off",
        aux_loss_coef=config.moe.aux_loss_coef,
        z_loss_coef=config.moe.z_loss_coef,
    )
    totals = run.policy.backward(micro_batches, loss)
    routers, flipped = (None, []) if passes is None else (passes.report(), passes.flipped())
    records, tokens = _gathered(recorder, flipped, run.groups)
    grad_norm = run.policy.grad_norm()

    broken = [record for record in records if record.nonfinite]
    _check_finite(broken, micro_batches.totals.num_sequences, batch.rollout, config, log, state.step + 1)
    check_kl(totals, config.optimizer.max_kl, name, device)
    suspects = [batch.rollout.name(record.sample) for record in broken[:_NAMED]]
    reason = skip_reason(state, config.optimizer, grad_norm, suspects, device)
    if reason is None:
        taken = run.policy.step(totals, grad_norm)
    elif (skips := state.skips_in_a_row) > (most := config.optimizer.max_skips):
        text = f"{name}: {reason}. This is skip {skips} in a row; optimizer.max_skips allows {most}"
        raise Diverged(text, means(totals) | {"actor/grad_norm": grad_norm})
    else:
        log.warn("skipped optimizer step", f"{name}: skipped because {reason} (in a row: {skips})")
        taken = run.policy.skip(totals, grad_norm)

    if on_policy and (wrong := [r for r in records if r.counts and r.log_ratio_sum != 0]):
        log.say(_off_policy(state.step + 1, wrong, batch.rollout, config.fp8.recipe))
    moved = batch.stale or any(step.moved for step in before) or len(batch.sizes) * config.batch.epochs == 1
    return OptimizerStep(
        number=number,
        update=taken,
        records=records,
        num_sequences=micro_batches.totals.num_sequences,
        on_policy=on_policy,
        measured=moved and not on_policy,
        tokens=tokens,
        routers=routers,
    )


def _gathered(
    recorder: Recorder, flipped: Sequence[Tensor], groups: ParallelGroups
) -> tuple[list[SequenceRecord], list[Piece]]:
    """Return the records of all ranks' sequences, and the token log-probs of some. Collective."""
    # Context-parallel ranks all have the records of their sequences; of a pipeline, only the last stage has.
    # Share those of one rank, because they decide control flow.
    records = share(recorder.records(groups.dp.rank(), flipped, groups.cp), group=groups.pp, source=-1)
    for group in (groups.tp, groups.cp):
        records = share(records, group=group)
    tokens: list[Piece] = []
    if recorder.every:
        pieces = share(gather_lists(recorder.pieces(), group=groups.cp), group=groups.pp, source=-1)
        tokens = gather_lists(pieces, group=groups.dp)
    return gather_lists(records, group=groups.dp), tokens


def _check_finite(
    broken: Sequence[SequenceRecord], of: int, rollout: Rollout, config: Config, log: RunLog, step: int
) -> None:
    """Name the sequences that are not finite, of the ``of`` of an optimizer step. Raises ``TrainingError`` if
    they are more than ``loss.max_nonfinite_share``."""
    for record in broken[:_NAMED]:
        log.say(
            f"step {step}: dropped a sequence that is not finite: {rollout.name(record.sample)} "
            f"(data-parallel rank {record.rank}, S = {record.log_ratio_sum}, L = {record.length})"
        )
    if len(broken) > config.loss.max_nonfinite_share * of:
        raise TrainingError(
            f"step {step}: {len(broken)} of {of} sequences of one optimizer step are not finite; "
            f"loss.max_nonfinite_share allows {config.loss.max_nonfinite_share}. The weights are those "
            "before it. Resume from the last checkpoint with a smaller optimizer.lr, or look for the cause."
        )


def check_kl(totals: Totals, limit: float, name: str, device: torch.device) -> None:
    """Raise ``Diverged`` if the policy is too far from the old policy to learn from the rollout. Collective.

    The limit is on k1, the mean of log π_old − log π, which is unbiased and in which a token counts its
    log-ratio. In k3, a rare token that became likely can count e^15, which is no reason to stop.

    Args:
        totals: sums and denominators of the optimizer step's metrics.
        limit: ``optimizer.max_kl``, nats per token.
        name: name of the optimizer step, for the message.
        device: device of the collective.
    """
    metrics = means(totals)
    kl = metrics["actor/ppo_kl"]
    # Tensor-parallel ranks need not agree on the last bits.
    if any_rank(kl > limit, device=device):
        raise Diverged(
            f"{name}: the policy is {kl:.3g} nats per token (actor/ppo_kl) away from the old policy; "
            f"optimizer.max_kl allows {limit:g}",
            metrics,
        )


def skip_reason(
    state: State, options: Optimizer, grad_norm: float, suspects: Sequence[str], device: torch.device
) -> str | None:
    """Return why the optimizer step is to be skipped, because the gradient is not finite or a spike; else
    None. Counts skips in a row and keeps the norm in ``state``. Collective.

    A spike is a global norm, before clipping, above ``optimizer.skip_norm_ratio`` times the median of recent
    norms. These exclude spikes, which would raise the median, and 0, the norm of a mini-batch without
    advantages. ``suspects`` name responses whose log-probs are not finite.
    """
    usual = median(state.norms) if len(state.norms) >= FEWEST_NORMS else 0.0
    finite, ratio = math.isfinite(grad_norm), options.skip_norm_ratio  # finite on all ranks or on none
    spike = ratio is not None and any_rank(finite and usual > 0 and grad_norm > ratio * usual, device=device)
    if finite and not spike:
        state.skips_in_a_row = 0
        if grad_norm > 0 and ratio is not None:
            state.norms.append(grad_norm)
        return None
    state.skips_in_a_row += 1
    if finite:
        return f"the gradient norm is {grad_norm:.3g}, but the median of recent ones is {usual:.3g}"
    if suspects:
        return f"the gradient is not finite, as are log-probs of {'; '.join(suspects)}"
    return "the gradient is not finite, but every log-prob is: is it an overflow?"


def _off_policy(step: int, wrong: Sequence[SequenceRecord], rollout: Rollout, recipe: str) -> str:
    """Return the line about an S that is not 0 in an on-policy update, where old and new pass should be
    identical. Raises ``TrainingError`` with FP8, as the causes (a stale copy of a weight, other packs) change
    S as much as learning does. Otherwise the cause is a varying order of summation."""
    worst = max(wrong, key=lambda r: abs(r.log_ratio_sum))
    text = (
        f"step {step}: S is not 0 before the first update, but {worst.log_ratio_sum:.3g} nats for "
        f"{rollout.name(worst.sample)} (L = {worst.length})"
    )
    if recipe == "none":
        return f"{text}: kernels sum in an order that changes from pass to pass"
    raise TrainingError(
        f"{text}: with fp8.recipe = {recipe}, the passes of old and new log-probs differ. Likely causes: "
        "one pass did not have fresh FP8 copies of the weights, or had other packs. The last checkpoint is "
        "from before this step; to resume in bfloat16, set fp8.recipe = none"
    )


def observe(
    step: OptimizerStep, state: State, groups: ParallelGroups, log: RunLog, *, warm: bool, fresh: bool
) -> None:
    """Let the band of the loss learn from an optimizer step, if it is to be measured, identically on every
    rank. ``warm``: the learning rate's warm-up was over; ``fresh``: the step was in the first epoch.
    Collective."""
    if not step.measured:
        return
    loss, before = state.loss, state.loss.calibrated()
    sums, lengths = as_tensors(step.records)
    loss.observe(sums, lengths, update=step.number, warm=warm, fresh=fresh)
    # Results may differ in rounding on other processors, so use the first rank's.
    loss.load_state_dict(agreed(loss.state_dict(), groups))
    if (band := loss.calibrated()) != before:
        log.say(f"step {state.step + 1}: clip band: {band}")
