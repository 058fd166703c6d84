"""The optimizer steps on one rollout. Each of them consists of:

1. Forward and backward on the packs of a mini-batch, which gives the gradient and a record of each sequence.
2. Name and count sequences with a non-finite S, up to the share that the run allows.
3. End the run if the policy is too far from the old policy (``optimizer.max_kl``).
4. Skip the step if its gradient is not finite, as a weight of 0 does not stop a NaN inside the network from
   reaching every gradient (0·NaN is NaN); or if it is far larger than recent ones
   (``optimizer.skip_norm_ratio``): clipping would bound the size of the step, but not its direction, and
   Adam's moments would keep it.
5. Update the weights, and let the band of the loss learn from S.

The weights do not change before 5., even if the run ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NoReturn

from torch import Tensor

from megatron_fspo.errors import TrainingError
from megatron_fspo.job.folder import checkpoints
from megatron_fspo.losses import LossState
from megatron_fspo.mcore.policy import Update
from megatron_fspo.mcore.policy_loss import PolicyLoss
from megatron_fspo.mcore.router import RouterPasses
from megatron_fspo.packing.batch import Packs
from megatron_fspo.parallel.groups import ParallelGroups, Totals, agreed, any_rank, gather_lists, means, share
from megatron_fspo.record.records import Recorder, SequenceRecord, as_tensors, sigma_of
from megatron_fspo.record.tokens import Piece
from megatron_fspo.trainer.build import Training
from megatron_fspo.trainer.rollout import Rollout

FEWEST_NORMS = 8
"""Number of past gradient norms required to detect spikes."""
_NAMED = 8
"""Maximum number of responses that a message names."""


@dataclass(kw_only=True)
class Step:
    """State of a training step, from its responses to its last optimizer step."""

    rollout: Rollout
    packs: Packs
    """The packs of all mini-batches, with their old log-probs."""
    sizes: list[int]
    """Number of packs of each mini-batch."""
    metrics: dict[str, float]
    """Metrics of the responses and the old pass."""
    warm: bool
    """True if the step began after the learning rate's warm-up."""
    on_policy: bool = True
    """True if S = 0 in the next optimizer step, as the policy has not moved since the old pass."""
    moved: bool = False
    """True if the policy differs from the one that sampled, by updates on this rollout or earlier ones."""
    updates: list[Update] = field(default_factory=list)
    """One for each optimizer step taken."""
    first: list[SequenceRecord] = field(default_factory=list)
    """Records of the first optimizer step."""
    off_policy: list[SequenceRecord] = field(default_factory=list)
    measured: list[SequenceRecord] = field(default_factory=list)
    """The off-policy records from which the band is measured."""
    tokens: list[Piece] = field(default_factory=list)
    """Token log-probs of some of the off-policy records, for the run folder."""
    nonfinite: int = 0
    """Number of dropped sequences, summed over optimizer steps."""
    old_report: Tensor | None = None
    """Report of the routers in the old pass; None without an old pass or without experts."""
    reports: dict[int, Tensor] = field(default_factory=dict)
    """Index of an optimizer step → report of its routers; empty without experts."""

    @property
    def turn(self) -> int:
        """Index of the next mini-batch."""
        return len(self.updates) % len(self.sizes)

    def packs_of(self, turn: int) -> Packs:
        """Return the packs of a mini-batch."""
        first = sum(self.sizes[:turn])
        return self.packs[first : first + self.sizes[turn]]


def optimize(run: Training, step: Step) -> bool:
    """Take the optimizer steps of a step: each mini-batch, ``batch.epochs`` times; return False if the step
    was discarded. Collective.

    If a stop is requested after the first optimizer step, the step is discarded if all steps before it are
    saved, because a resumed run can repeat it; otherwise it is completed.
    """
    turns = len(step.sizes) * run.inputs.config.batch.epochs
    with run.log.phase("update_actor", turns, "step", run.timings) as progress:
        while len(step.updates) < turns:
            update, records = _update(run, step)
            if not step.updates:  # these used the weights of the old pass
                step.first = records
            if step.on_policy:
                if wrong := [r for r in records if r.counts and r.log_ratio_sum != 0]:
                    _tell_off_policy(run, wrong, step.rollout)
            else:
                step.off_policy += records
            if not step.on_policy and (step.moved or turns == 1):
                step.measured += records
                loss, before, kl = run.loss, run.loss.calibrated(), update.metrics["fspo/kl_k3"]
                observe(loss, records, kl_k3=kl, warm=step.warm, groups=run.groups)
                if (text := loss.calibrated()) != before:
                    run.log.say(f"step {run.step + 1}: the band from here on: {text}")
            step.updates.append(update)
            step.on_policy = step.on_policy and update.skipped
            step.moved = step.moved or (update.grad_norm > 0 and not update.skipped)
            progress(1)
            if run.saved == run.step and len(step.updates) < turns and is_stopping(run):
                return False
    return True


def is_stopping(run: Training) -> bool:
    """Return True if a stop was requested; the same on all ranks. Collective."""
    return any_rank(run.groups.control.stop_requested, device=run.inputs.backend.device)


def _update(run: Training, step: Step) -> tuple[Update, list[SequenceRecord]]:
    """Take the next optimizer step; return it and the records of all ranks' sequences. Collective."""
    config = run.inputs.config.loss
    loss = PolicyLoss(
        objective=run.loss.objective(on_policy=step.on_policy),
        scoring=run.scoring,
        entropy_coef=config.entropy_coef,
        kl_coef=config.kl_coef,
    )
    totals, records = _gradient(run, step, loss)
    grad_norm = run.policy.grad_norm()
    broken = [record for record in records if record.nonfinite]
    step.nonfinite += len(broken)
    for record in broken[:_NAMED]:
        run.log.say(
            f"step {run.step + 1}: dropped a sequence that is not finite: {step.rollout.name(record.sample)} "
            f"(data-parallel rank {record.rank}, S = {record.log_ratio_sum}, L = {record.length})"
        )
    of = step.packs_of(step.turn).totals.num_sequences
    if len(broken) > config.max_nonfinite_share * of:
        raise TrainingError(
            f"step {run.step + 1}: {len(broken)} of {of} sequences of one optimizer step are not finite; "
            f"loss.max_nonfinite_share allows {config.max_nonfinite_share}. The weights are those before "
            "it. Resume from the last checkpoint with a smaller optimizer.lr, or look for the cause."
        )
    check_kl(run, step, totals)
    if is_to_be_skipped(run, step, totals, grad_norm, broken):
        return run.policy.skip(totals, grad_norm), records
    return run.policy.step(totals, grad_norm), records


def _gradient(run: Training, step: Step, loss: PolicyLoss) -> tuple[Totals, list[SequenceRecord]]:
    """Run forward and backward on the next mini-batch; return the sums of its metrics, and the records of all
    ranks' sequences. Collective."""
    kept = 0 if step.on_policy else run.inputs.config.log.tokens
    every = math.ceil(len(step.rollout) / kept) if kept else 0
    recorder = Recorder(len(step.updates) + 1, every)
    packs, passes = _routed(run, step.packs_of(step.turn))
    totals = run.policy.backward(packs, replace(loss, observer=recorder))
    flipped = []
    if passes is not None:
        step.reports[len(step.updates)] = passes.report()
        flipped = passes.flipped()
    # Context-parallel ranks all have the records of their sequences; of a pipeline, only the last stage has.
    # Share those of one rank, because they decide control flow.
    records = recorder.records(run.groups.dp.rank(), flipped, run.groups.cp)
    records = share(records, group=run.groups.pp, source=-1)
    for group in (run.groups.tp, run.groups.cp):
        records = share(records, group=group)
    if every:
        pieces = share(gather_lists(recorder.pieces(), group=run.groups.cp), group=run.groups.pp, source=-1)
        step.tokens += gather_lists(pieces, group=run.groups.dp)
    return totals, gather_lists(records, group=run.groups.dp)


def _routed(run: Training, packs: Packs) -> tuple[Packs, RouterPasses | None]:
    """Add an update's instructions for the routers of a mixture of experts to the packs."""
    moe = run.inputs.config.moe
    return run.policy.with_routers(
        packs,
        replay=moe.replay != "off",
        aux_loss_coef=moe.aux_loss_coef,
        z_loss_coef=moe.z_loss_coef,
    )


def check_kl(run: Training, step: Step, totals: Totals) -> None:
    """End the run if the policy is too far from the old policy to learn from the rollout. Collective.

    The limit is on k1, the mean of log π_old − log π, which is unbiased and in which a token counts its
    log-ratio. In k3, a rare token that became likely can count e^15, which is no reason to stop.

    Raises:
        TrainingError: the limit is exceeded; the metrics of the step so far are in the log.
    """
    metrics = means(totals)
    kl, limit = metrics["actor/ppo_kl"], run.inputs.config.optimizer.max_kl
    # Tensor-parallel ranks need not agree on the last bits.
    if any_rank(kl > limit, device=run.inputs.backend.device):
        _end(
            run,
            step,
            metrics,
            f"the policy is {kl:.3g} nats per token (actor/ppo_kl) away from the old policy; "
            f"optimizer.max_kl allows {limit:g}",
        )


def is_to_be_skipped(
    run: Training, step: Step, totals: Totals, grad_norm: float, broken: Sequence[SequenceRecord]
) -> bool:
    """Return True, with a warning, if the gradient is not finite or a spike. Collective.

    A spike is a global norm, before clipping, above ``optimizer.skip_norm_ratio`` times the median of recent
    norms. These exclude spikes, which would raise the median, and 0, the norm of a mini-batch without
    advantages. ``broken`` has the non-finite sequences.

    Raises:
        TrainingError: more than ``optimizer.max_skips`` skips in a row; the metrics so far are in the log.
    """
    options = run.inputs.config.optimizer
    usual = median(run.norms) if len(run.norms) >= FEWEST_NORMS else 0.0
    finite, ratio = math.isfinite(grad_norm), options.skip_norm_ratio  # finite on all ranks or on none
    spike = ratio is not None and any_rank(
        finite and usual > 0 and grad_norm > ratio * usual, device=run.inputs.backend.device
    )
    if finite and not spike:
        run.skips_in_a_row = 0
        if grad_norm > 0 and ratio is not None:
            run.norms.append(grad_norm)
        return False
    run.skips_in_a_row += 1
    reason = f"the gradient norm is {grad_norm:.3g}, but the median of recent ones is {usual:.3g}"
    if not finite:
        suspects = "; ".join(step.rollout.name(record.sample) for record in broken[:_NAMED])
        why = f"as are log-probs of {suspects}" if broken else "but every log-prob is: is it an overflow?"
        reason = f"the gradient is not finite, {why}"
    if run.skips_in_a_row > options.max_skips:
        text = f"This is skip {run.skips_in_a_row} in a row; optimizer.max_skips allows {options.max_skips}"
        _end(run, step, means(totals) | {"actor/grad_norm": grad_norm}, f"{reason}. {text}")
    run.log.warn(
        "skipped optimizer step",
        f"{_which(run, step)}: skipped because {reason} (in a row: {run.skips_in_a_row})",
    )
    return True


def _end(run: Training, step: Step, metrics: Mapping[str, float], reason: str) -> NoReturn:
    """End the run before the optimizer step, after logging the step's metrics so far. Collective."""
    run.end_save(wait=True, prune=False)
    run.log.step(run.step + 1, {**step.metrics, **metrics, **run.timings})
    written = checkpoints(run.inputs.config)
    last = f"The last checkpoint is {written[-1]}" if written else "There is no checkpoint yet"
    raise TrainingError(
        f"{_which(run, step)}: {reason}. {last}. "
        "Use a smaller optimizer.lr, or fewer batch.mini_batches or batch.epochs"
    )


def _which(run: Training, step: Step) -> str:
    return f"step {run.step + 1}, optimizer step {len(step.updates) + 1}"


def _tell_off_policy(run: Training, wrong: Sequence[SequenceRecord], rollout: Rollout) -> None:
    """Report that S is not 0 in an on-policy update, where old and new pass should be identical. With FP8
    this raises ``TrainingError``, as the causes (a stale copy of a weight, other packs) change S as much as
    learning does. Otherwise the cause is a varying order of summation, and this logs a line."""
    worst = max(wrong, key=lambda r: abs(r.log_ratio_sum))
    fp8 = run.inputs.config.fp8
    text = (
        f"step {run.step + 1}: S is not 0 before the first update, but {worst.log_ratio_sum:.3g} nats for "
        f"{rollout.name(worst.sample)} (L = {worst.length})"
    )
    if fp8.recipe == "none":
        run.log.say(f"{text}: kernels sum in an order that changes from pass to pass")
        return
    raise TrainingError(
        f"{text}: with fp8.recipe = {fp8.recipe}, the passes of old and new log-probs differ. Likely causes: "
        "one pass did not have fresh FP8 copies of the weights, or had other packs. The last checkpoint is "
        "from before this step; to resume in bfloat16, set fp8.recipe = none"
    )


def observe(
    loss: LossState, records: Sequence[SequenceRecord], *, kl_k3: float, warm: bool, groups: ParallelGroups
) -> None:
    """Update the loss's state from one off-policy mini-batch, identically on every rank. Collective."""
    sums, lengths = as_tensors(records)
    loss.observe(sums, lengths, kl_k3=kl_k3, sigma=sigma_of(records), warm=warm)
    # Results may differ in rounding on other processors, so use the first rank's.
    loss.load_state_dict(agreed(loss.state_dict(), groups))
