"""What is not finite: responses are dropped, named and counted, up to the share that a run allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from megatron_fspo.errors import TrainingError
from megatron_fspo.mcore.nonfinite import culprits, packs_to_blame, suspects_of, without
from megatron_fspo.mcore.policy_loss import PolicyLoss
from megatron_fspo.packing.batch import MicroBatch
from megatron_fspo.packing.pack import PackLayout
from megatron_fspo.parallel.groups import pack_layout
from megatron_fspo.record.records import SequenceRecord
from megatron_fspo.trainer.build import Training
from megatron_fspo.trainer.step import Step

_NAMED = 8
"""Responses that a message names at most."""


def drop_from_old_pass(run: Training, step: Step) -> bool:
    """Take the responses out of the packs that made the old pass, in its last column, not finite. Collective.

    Returns:
        whether there were any: the packs are others then, to be scored again.

    Raises:
        TrainingError: more than ``loss.max_nonfinite_share`` of a mini-batch.
    """
    suspects = suspects_of(step.packs, step.packs.columns["old_log_probs"], run.groups)
    found = culprits(step.packs, suspects, score=_score(run), layout=_layout(run), groups=run.groups)
    if found:
        _drop(run, step, found)
    return bool(found)


def drop_from_update(run: Training, step: Step, records: Sequence[SequenceRecord], loss: PolicyLoss) -> None:
    """Take the responses out of the packs that made the gradient of the next optimizer step not finite.

    Collective. No weight has moved, and the gradient is forgotten.

    Args:
        records: of this optimizer step, of all ranks.
        loss: without an observer, for a search among the packs.

    Raises:
        TrainingError: more than ``loss.max_nonfinite_share`` of the mini-batch, or no response is found.
    """
    run.policy.zero_gradients()
    packs, rank = step.mini_batch, run.groups.dp.rank()
    suspects = [r.sample for r in records if r.rank == rank and not math.isfinite(r.log_ratio_sum)]
    found = culprits(packs, suspects, score=_score(run), layout=_layout(run), groups=run.groups)
    if found:
        _drop(run, step, found)
        return
    blamed = packs_to_blame(run.policy, packs, loss, layout=_layout(run))
    where = "; ".join(
        f"Look at pack {' and '.join(str(place + 1) for place in places)} of {len(packs)} of each "
        f"data-parallel rank ({_names(step, numbers)})"
        for places, numbers in blamed
    )
    raise TrainingError(
        f"step {run.step + 1}, optimizer step {len(step.updates) + 1} of it: the gradient is not finite, "
        f"though every log-prob is. {where or 'That of each pack alone is finite, their sum is not'}. The "
        "weights are those of before this optimizer step. Resume from the last checkpoint with a smaller "
        "optimizer.lr, or look for what overflows in the backward pass."
    )


def check_finite(run: Training, step: Step, records: Sequence[SequenceRecord]) -> int:
    """Name the responses that the loss dropped; count them with those that left the packs.

    Args:
        records: of the next optimizer step, of all ranks.

    Raises:
        TrainingError: more than ``loss.max_nonfinite_share`` of the mini-batch. The weights are those of
            before the optimizer step.
    """
    broken = [record for record in records if record.nonfinite]
    _name(run, step, broken)
    count = len(broken) + len(step.dropped_from(step.turn))
    _check_share(run, step, step.turn, count)
    return count


def _drop(run: Training, step: Step, found: Mapping[int, int]) -> None:
    """Take responses, each with its data-parallel rank, out of all packs of the step."""
    new = [_record(step, number, rank) for number, rank in found.items()]
    step.dropped += new
    _name(run, step, new)
    for turn in range(len(step.sizes)):
        _check_share(run, step, turn, len(step.dropped_from(turn)))
    gone = [sum(r.length for r in new if step.turn_of(r.sample) == turn) for turn in range(len(step.sizes))]
    tokens = [count for count, size in zip(gone, step.sizes, strict=True) for _ in range(size)]
    step.packs = without(step.packs, found.keys(), tokens, _layout(run))


def _record(step: Step, number: int, rank: int) -> SequenceRecord:
    return SequenceRecord(
        sample=number,
        rank=rank,
        length=int(step.rollout.lengths[number]),
        log_ratio_sum=math.nan,
        advantage=float(step.rollout.advantages[number]),
        clipped_low=0.0,
        clipped_high=0.0,
        dual_clipped=0.0,
        out_of_band=False,
        nonfinite=True,
    )


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


def _names(step: Step, numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return "; ".join(step.rollout.name(number) for number in numbers[:_NAMED]) + more


def _score(run: Training) -> Callable[[Sequence[MicroBatch]], list[Tensor]]:
    return lambda batches: run.policy.score(batches, run.scoring)


def _layout(run: Training) -> PackLayout:
    """What the packs of the step fit."""
    config = run.inputs.config
    return pack_layout(
        run.groups,
        run.inputs.backend.device,
        sequence=config.parallel.sequence,
        interleaved=config.parallel.interleaved,
        align=config.fp8.align,
    )
