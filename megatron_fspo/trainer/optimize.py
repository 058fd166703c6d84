"""The optimizer steps on one rollout, each in the order in which it happens.

1. Forward and backward on the packs of a mini-batch: the gradient, and a record of every sequence.
2. Responses that make the gradient not finite leave the packs, and 1. is done again.
3. Sequences whose loss is not finite are named and counted, up to the share that a run allows.
4. A policy too far from the one that S starts from ends the run (``optimizer.max_kl``).
5. A gradient far larger than those before it moves nothing (``optimizer.skip_norm_ratio``): clipping bounds
   the size of such a step, not its direction, and Adam remembers it.
6. The weights move, and the band of the loss learns from S.

Until 6. the weights are those of before the optimizer step, also where the run ends.
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
from megatron_fspo.mcore.nonfinite import culprits, packs_to_blame, without
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
"""Gradient norms that must be known before one is judged."""
_NAMED = 8
"""Responses that a message names at most."""


@dataclass(kw_only=True)
class Step:
    """A training step from its responses to its last optimizer step."""

    rollout: Rollout
    packs: Packs
    """The packs of all mini-batches, with their old log-probs."""
    sizes: list[int]
    """Packs of each mini-batch."""
    metrics: dict[str, float]
    """Metrics of responses and old pass."""
    warm: bool
    """True if it began after the learning rate's warm-up."""
    on_policy: bool = True
    """S = 0 before the next update: nothing has moved the policy since the old pass."""
    moved: bool = False
    """The policy is not the one that sampled: by an update of this rollout, or by earlier ones."""
    updates: list[Update] = field(default_factory=list)
    """One for every optimizer step taken."""
    first: list[SequenceRecord] = field(default_factory=list)
    """Records of the first of them, before the policy has moved."""
    off_policy: list[SequenceRecord] = field(default_factory=list)
    measured: list[SequenceRecord] = field(default_factory=list)
    """Those of them whose S says what updates do: the band is measured from these."""
    tokens: list[Piece] = field(default_factory=list)
    """Token log-probs of some of the off-policy records, for the run's folder."""
    nonfinite: int = 0
    """Sequences that optimizer steps had to do without, each counted in every one."""
    old_report: Tensor | None = None
    """Of the routers in the old pass; None without a pass or without experts."""
    reports: dict[int, Tensor] = field(default_factory=dict)
    """Of the routers in each optimizer step; empty without experts."""
    dropped: list[SequenceRecord] = field(default_factory=list)
    """Records of responses that had to leave the packs, as they made a pass not finite."""

    @property
    def turn(self) -> int:
        """The number of the next mini-batch."""
        return len(self.updates) % len(self.sizes)

    def packs_of(self, turn: int) -> Packs:
        """The packs of a mini-batch."""
        first = sum(self.sizes[:turn])
        return self.packs[first : first + self.sizes[turn]]

    def dropped_from(self, turn: int) -> list[SequenceRecord]:
        """Records of the responses of a mini-batch that left the packs."""
        turns, n = len(self.sizes), self.rollout.lengths.numel()
        return [record for record in self.dropped if record.sample * turns // n == turn]


def optimize(run: Training, step: Step) -> bool:
    """Take the optimizer steps of a step: every mini-batch, ``batch.epochs`` times. Collective.

    When the job is asked to stop after the first of them, the weights have moved. Where the steps before are
    saved, this one is thrown away at once: it can be made again. Where they are not, it is finished first.

    Returns:
        False where the step was thrown away.
    """
    turns = len(step.sizes) * run.inputs.config.batch.epochs
    with run.log.phase("update_actor", turns, "step", run.timings) as progress:
        while len(step.updates) < turns:
            update, records = _update(run, step)
            if not step.updates:  # the weights are still those of the old pass
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
    """Return True if the job was asked to stop; the same on all ranks. Collective."""
    return any_rank(run.groups.control.stop_requested, device=run.inputs.backend.device)


def _update(run: Training, step: Step) -> tuple[Update, list[SequenceRecord]]:
    """Take the next optimizer step; returns it, and the records of its sequences on all ranks.

    Sequences that had to leave the packs are not among them.
    """
    config = run.inputs.config.loss
    loss = PolicyLoss(
        objective=run.loss.objective(on_policy=step.on_policy),
        scoring=run.scoring,
        entropy_coef=config.entropy_coef,
        kl_coef=config.kl_coef,
    )
    totals, records = _gradient(run, step, loss)
    while not math.isfinite(grad_norm := run.policy.grad_norm()):
        _drop_from_update(run, step, loss, records)
        totals, records = _gradient(run, step, loss)
    broken = [record for record in records if record.nonfinite]
    if broken or step.dropped:
        _name(run, step, broken)
        count = len(broken) + len(step.dropped_from(step.turn))
        _check_share(run, step, step.turn, count)
        step.nonfinite += count
    check_kl(run, step, totals)
    if is_to_be_skipped(run, step, totals, grad_norm):
        return run.policy.skip(totals, grad_norm), records
    return run.policy.step(totals, grad_norm), records


def _gradient(run: Training, step: Step, loss: PolicyLoss) -> tuple[Totals, list[SequenceRecord]]:
    """Backward on the next mini-batch: sums of its metrics, and the records of its sequences on all ranks."""
    kept = 0 if step.on_policy else run.inputs.config.log.tokens
    every = math.ceil(len(step.rollout) / kept) if kept else 0
    recorder = Recorder(len(step.updates) + 1, every)
    packs, passes = _routed(run, step.packs_of(step.turn))
    totals = run.policy.backward(packs, replace(loss, observer=recorder))
    flipped = []
    if passes is not None:
        step.reports[len(step.updates)] = passes.report()
        flipped = passes.flipped()
    # Every context-parallel rank saw the whole of its sequences; of a pipeline, only the last stage did. What
    # follows on the records stops the run, so all have those of one rank.
    records = recorder.records(run.groups.dp.rank(), flipped, run.groups.cp)
    records = share(records, group=run.groups.pp, source=-1)
    for group in (run.groups.tp, run.groups.cp):
        records = share(records, group=group)
    if every:
        pieces = share(gather_lists(recorder.pieces(), group=run.groups.cp), group=run.groups.pp, source=-1)
        step.tokens += gather_lists(pieces, group=run.groups.dp)
    return totals, gather_lists(records, group=run.groups.dp)


def _routed(run: Training, packs: Packs) -> tuple[Packs, RouterPasses | None]:
    """The packs as the update takes them: with what the routers of a mixture of experts are to do."""
    moe = run.inputs.config.moe
    return run.policy.with_routers(
        packs,
        replay=moe.replay != "off",
        aux_loss_coef=moe.aux_loss_coef,
        z_loss_coef=moe.z_loss_coef,
    )


def _drop_from_update(run: Training, step: Step, loss: PolicyLoss, records: Sequence[SequenceRecord]) -> None:
    """Take the responses out of the packs that made the gradient of the next optimizer step not finite, and
    forget the gradient; ``records`` are those of this optimizer step, of all ranks. Collective.

    Raises:
        TrainingError: more than ``loss.max_nonfinite_share`` of the mini-batch, or no response is to blame.
    """
    run.policy.zero_gradients()
    packs, rank = step.packs_of(step.turn), run.groups.dp.rank()
    suspects = [r.sample for r in records if r.rank == rank and not math.isfinite(r.log_ratio_sum)]
    if drop_culprits(run, step, packs, suspects):
        return
    blamed = packs_to_blame(run.policy, _routed(run, packs)[0], loss, layout=run.layout)
    where = []
    for turns, numbers in blamed:
        names = "; ".join(step.rollout.name(number) for number in numbers[:_NAMED])
        names += f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
        number = " and ".join(str(turn + 1) for turn in turns)
        where.append(f"Look at pack {number} of {len(packs)} of each data-parallel rank ({names})")
    raise TrainingError(
        f"{_which(run, step)}: the gradient is not finite, though every log-prob is. "
        f"{'; '.join(where) or 'That of each pack alone is finite, their sum is not'}. The "
        "weights are those of before this optimizer step. Resume from the last checkpoint with a smaller "
        "optimizer.lr, or look for what overflows in the backward pass."
    )


def drop_culprits(run: Training, step: Step, packs: Packs, suspects: Sequence[int]) -> bool:
    """Take the suspects that made ``packs`` not finite out of all packs of the step. Collective.

    Returns:
        True if there were any: the packs are others then, to be scored again.

    Raises:
        TrainingError: more than ``loss.max_nonfinite_share`` of a mini-batch.
    """
    guilty = culprits(
        packs,
        suspects,
        score=lambda batches: run.policy.score(batches, run.scoring),
        layout=run.layout,
        groups=run.groups,
    )
    if not guilty:
        return False
    new = [
        SequenceRecord(
            sample=number,
            rank=rank,
            length=int(step.rollout.lengths[number]),
            log_ratio_sum=math.nan,
            advantage=float(step.rollout.advantages[number]),
            nonfinite=True,
        )
        for number, rank in guilty.items()
    ]
    before = [sum(r.length for r in step.dropped_from(turn)) for turn in range(len(step.sizes))]
    step.dropped += new
    _name(run, step, new)
    gone: list[int] = []
    for turn, size in enumerate(step.sizes):
        dropped = step.dropped_from(turn)
        _check_share(run, step, turn, len(dropped))
        gone += [sum(r.length for r in dropped) - before[turn]] * size
    step.packs = without(step.packs, guilty.keys(), gone, run.layout)
    return True


def _name(run: Training, step: Step, dropped: Sequence[SequenceRecord]) -> None:
    for record in dropped[:_NAMED]:
        run.log.say(
            f"step {run.step + 1}: dropped a sequence that is not finite: {step.rollout.name(record.sample)} "
            f"(data-parallel rank {record.rank}, S = {record.log_ratio_sum}, L = {record.length})"
        )


def _check_share(run: Training, step: Step, turn: int, count: int) -> None:
    """Raise where ``count`` dropped sequences are too many for one mini-batch."""
    of, limit = step.packs_of(turn).totals.num_sequences, run.inputs.config.loss.max_nonfinite_share
    if count > limit * of:
        raise TrainingError(
            f"step {run.step + 1}: {count} of {of} sequences of one optimizer step are not "
            f"finite; loss.max_nonfinite_share allows {limit}. The weights are those of before this "
            "optimizer step. Resume from the last checkpoint with a smaller optimizer.lr, or look for what "
            "makes the logits non-finite."
        )


def check_kl(run: Training, step: Step, totals: Totals) -> None:
    """End a run whose policy has left the one that S starts from: what follows would be learned from noise.
    Collective.

    By k1, the mean of log π_old - log π: it is unbiased, and a token moves it by its log-ratio only. In k3
    one rare token that became likely counts e^15, which is no reason to stop.

    Raises:
        TrainingError: a row of the step so far is in the log.
    """
    metrics = means(totals)
    kl, limit = metrics["actor/ppo_kl"], run.inputs.config.optimizer.max_kl
    # Tensor-parallel ranks need not agree on the last bits.
    if any_rank(kl > limit, device=run.inputs.backend.device):
        _end(
            run,
            step,
            metrics,
            f"the policy is {kl:.3g} nats per token (actor/ppo_kl) from the one that S starts from; "
            f"optimizer.max_kl allows {limit:g}",
        )


def is_to_be_skipped(run: Training, step: Step, totals: Totals, grad_norm: float) -> bool:
    """Return True, with a warning, if the gradient is a spike. Collective.

    That is a global norm, before clipping, of more than ``optimizer.skip_norm_ratio`` times the median of the
    last ones, which a few spikes do not move. Norms of spikes are not remembered, as they would become usual;
    nor is 0, which a mini-batch without any advantage has.

    Raises:
        TrainingError: more than ``optimizer.max_skips`` in a row; a row of the step so far is in the log.
    """
    options = run.inputs.config.optimizer
    if options.skip_norm_ratio is None:
        return False
    usual = median(run.norms) if len(run.norms) >= FEWEST_NORMS else 0.0
    spike = usual > 0 and grad_norm > options.skip_norm_ratio * usual
    if not any_rank(spike, device=run.inputs.backend.device):
        run.skips_in_a_row = 0
        if grad_norm > 0:
            run.norms.append(grad_norm)
        return False
    run.skips_in_a_row += 1
    reason = f"the gradient norm is {grad_norm:.3g}, the median of those before it {usual:.3g}"
    if run.skips_in_a_row > options.max_skips:
        _end(
            run,
            step,
            means(totals) | {"actor/grad_norm": grad_norm},
            f"{reason}, a spike in {run.skips_in_a_row} steps in a row; optimizer.skip_norm_ratio = "
            f"{options.skip_norm_ratio:g} skips such a step, optimizer.max_skips allows {options.max_skips}",
        )
    run.log.warn(
        "gradient spike", f"{_which(run, step)}: skipped, as {reason} (in a row: {run.skips_in_a_row})"
    )
    return True


def _end(run: Training, step: Step, metrics: Mapping[str, float], reason: str) -> NoReturn:
    """End the run before the optimizer step, with a row of the step so far. Collective."""
    run.end_save(wait=True, prune=False)
    run.log.step(run.step + 1, {**step.metrics, **metrics, **run.timings})
    written = checkpoints(run.inputs.config)
    last = f"The last checkpoint is {written[-1]}" if written else "There is no checkpoint yet"
    raise TrainingError(
        f"{_which(run, step)}: {reason}. {last}. "
        "Use a smaller optimizer.lr, or fewer batch.mini_batches or batch.epochs"
    )


def _which(run: Training, step: Step) -> str:
    return f"step {run.step + 1}, optimizer step {len(step.updates) + 1} of it"


def _tell_off_policy(run: Training, wrong: Sequence[SequenceRecord], rollout: Rollout) -> None:
    """S of the first update must be 0: old and new pass are the same pass.

    In FP8 what makes them differ (a stale copy of a weight, other packs) moves S by as much as learning does:
    the run stops. Otherwise it can only be kernels that add up in an order that changes: it is said.
    """
    worst = max(wrong, key=lambda r: abs(r.log_ratio_sum))
    fp8 = run.inputs.config.fp8
    text = (
        f"step {run.step + 1}: S is not 0 before the first update, but {worst.log_ratio_sum:.3g} nats for "
        f"{rollout.name(worst.sample)} (L = {worst.length})"
    )
    if fp8.recipe == "none":
        run.log.say(f"{text}: kernels whose sums change from pass to pass")
        return
    raise TrainingError(
        f"{text}: with fp8.recipe = {fp8.recipe} the passes of old and new log-probs differ. Likeliest "
        "causes: one of them began without fresh FP8 copies of the weights, or had other packs. The last "
        "checkpoint is of before this step; fp8.recipe = none trains in bfloat16"
    )


def observe(
    loss: LossState, records: Sequence[SequenceRecord], *, kl_k3: float, warm: bool, groups: ParallelGroups
) -> None:
    """Let the band learn from one off-policy mini-batch. The same band on every rank after it. Collective."""
    sums, lengths = as_tensors(records)
    loss.observe(sums, lengths, kl_k3=kl_k3, sigma=sigma_of(records), warm=warm)
    # Powers, means and medians of the same numbers, but perhaps on another processor: the first rank's.
    loss.load_state_dict(agreed(loss.state_dict(), groups))
