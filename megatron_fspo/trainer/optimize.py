"""The optimizer steps on one rollout, and what they report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_fspo.config import Config
from megatron_fspo.errors import TrainingError
from megatron_fspo.mcore.policy import Update
from megatron_fspo.mcore.policy_loss import PolicyLoss
from megatron_fspo.mismatch.alarm import FP8_LIMIT, LIMIT, FreshTokens, Setting, check_mismatch
from megatron_fspo.mismatch.correction import correct, little_is_left
from megatron_fspo.mismatch.measure import measure, outlier_share
from megatron_fspo.packing.pack import Packs
from megatron_fspo.parallel.agree import agreed
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.parallel.metrics import gather_lists, share
from megatron_fspo.trainer.batches import split
from megatron_fspo.trainer.build import Training
from megatron_fspo.trainer.losses import LossState
from megatron_fspo.trainer.noise import noise_metrics
from megatron_fspo.trainer.records import SequenceRecord, as_tensors, clip_metrics, records_of, sigma_of
from megatron_fspo.trainer.rollout import Rollout
from megatron_fspo.trainer.step import Step


def needs_old_pass(config: Config) -> bool:
    """Whether the trainer scores the responses before the first update.

    Before a single optimizer step old and new log-probs are the same. But a sampler apart from the trainer is
    to be measured all the same, and a correction needs the measurement.
    """
    if config.rollout.old_log_probs == "sampled":
        return False
    several = config.batch.mini_batches * config.batch.epochs > 1
    return several or config.rollout.engine == "vllm" or config.correction.name != "none"


def with_old_log_probs(run: Training, packs: Packs, rollout: Rollout) -> tuple[Packs, dict[str, float]]:
    """The log-probs that S starts from, as ``rollout.old_log_probs`` has them. Collective.

    Returns:
        the packs with old log-probs (without, where they equal the new ones) and, after a pass, with
        the weights of a correction; and the metrics of the pass.
    """
    if run.inputs.config.rollout.old_log_probs == "sampled":
        return packs.with_columns(old_log_probs=[batch.sampled_log_probs for batch in packs]), {}
    return score_old(run, packs, rollout) if needs_old_pass(run.inputs.config) else (packs, {})


def score_old(run: Training, packs: Packs, rollout: Rollout) -> tuple[Packs, dict[str, float]]:
    """Log-probs before the first update, with the packs of the training pass; compared with the sampler's.

    Returns:
        the packs with old log-probs and rollout weights, and the metrics of mismatch and correction.
    """
    with run.log.phase("old_log_prob", len(packs), "pack", run.timings) as progress:
        packs = packs.with_columns(old_log_probs=run.policy.score(packs, run.scoring))
        progress(len(packs))
    setting = _alarm_setting(run)
    fresh = FreshTokens(rollout.fresh_from(run.step), setting)
    mismatch = measure(packs, len(rollout), group=run.groups.dp_cp, also=fresh.add)
    alarm, text = check_mismatch(packs, fresh, setting)
    if text is not None:
        run.log.say(f"step {run.step + 1}: {text}")
    rule = run.inputs.config.correction
    packs, correction = correct(rule, packs, mismatch, groups=run.groups)
    metrics = mismatch.metrics | alarm | correction
    if (text := little_is_left(rule, metrics)) is not None:
        run.log.remind("correction", run.step + 1, text)
    return packs, metrics


def _alarm_setting(run: Training) -> Setting:
    rollout, parallel = run.inputs.config.rollout, run.inputs.config.parallel
    usual = FP8_LIMIT if run.inputs.config.fp8.on else LIMIT[run.inputs.dtype]
    return Setting(
        version=run.step,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        limit=rollout.mismatch_limit or usual,
        rescore=lambda batches, temperature: run.policy.score(
            batches, replace(run.scoring, temperature=temperature)
        ),
        # The interleaved schedule takes micro-batches by the number of stages.
        probe=parallel.pipeline if parallel.virtual_pipeline > 1 else 1,
        groups=run.groups,
        device=run.inputs.backend.device,
    )


def score_reference(run: Training, packs: Packs) -> Packs:
    """Log-probs under the reference policy, for the KL penalty."""
    assert run.reference is not None
    with run.log.phase("ref", len(packs), "pack", run.timings) as progress:
        scores = run.reference.score(packs, run.scoring)
        progress(len(packs))
    return packs.with_columns(reference_log_probs=scores)


def optimize(run: Training, step: Step) -> bool:
    """The optimizer steps that are still to be taken: every mini-batch, ``batch.epochs`` times. Collective.

    Returns:
        False where the job was asked to stop before the last.
    """
    config = run.inputs.config
    sampled = config.rollout.old_log_probs == "sampled"
    turns = split(step.packs, step.sizes) * config.batch.epochs
    with run.log.phase("update_actor", len(turns), "step", run.timings) as progress:
        progress(len(step.updates))
        for batches in turns[len(step.updates) :]:
            on_policy = not step.updates and not sampled
            update, records = _update(run, batches, on_policy=on_policy)
            step.nonfinite += _check_finite(run, records, step.rollout, of=batches.totals.num_sequences)
            if not step.updates:  # the weights are still those of the old pass
                step.first = _first_update(update, records, sampled=sampled)
                if not sampled:
                    _check_on_policy(run, records, step.rollout)
            if not on_policy:
                step.off_policy += records
                kl_k3 = update.metrics["fspo/kl_k3"]
                observe(run.loss, records, kl_k3=kl_k3, warm=step.warm, groups=run.groups)
            step.updates.append(update)
            progress(1)
            if len(step.updates) < len(turns) and run.stopping():
                return False
    return True


def update_metrics(run: Training, step: Step) -> dict[str, float]:
    """What the optimizer steps of a step report, once all are taken."""
    updates = step.updates
    run.log.sequences(run.step + 1, step.off_policy)
    metrics = {name: _mean([update.metrics[name] for update in updates]) for name in updates[0].metrics}
    metrics |= {
        "actor/grad_norm": sum(update.grad_norm for update in updates) / len(updates),
        "actor/grad_norm/max": max(update.grad_norm for update in updates),
        "actor/lr": updates[-1].learning_rate,
        "fspo/nonfinite": float(step.nonfinite),
    }
    if run.inputs.config.fp8.on:
        metrics["fspo/fp8_modules"] = float(run.fp8_modules)
    clips = clip_metrics(step.off_policy, seed=run.inputs.config.run.seed)
    clips |= noise_metrics(run.inputs.noise, step.off_policy, run.loss.objective())
    return metrics | step.first | clips | run.loss.metrics()


def _mean(values: Sequence[float]) -> float:
    """Of those that are there: a mini-batch whose groups have no spread has no metrics."""
    found = [value for value in values if not math.isnan(value)]
    return sum(found) / len(found) if found else math.nan


def _first_update(update: Update, records: Sequence[SequenceRecord], *, sampled: bool) -> dict[str, float]:
    """What the first update of a rollout shows: no update has moved the policy yet.

    S must be 0 then. From the sampler's log-probs it is the mismatch instead, of the first mini-batch: all
    there is to measure it by without a pass.
    """
    if not sampled:
        largest = max((abs(r.log_ratio_sum) for r in records if r.counts), default=math.nan)
        return {"fspo/on_policy_abs_s_max": largest}
    sigma = sigma_of(records) or math.nan
    return {
        "rollout/kl_k1": update.metrics["actor/ppo_kl"],
        "rollout/kl_k3": update.metrics["fspo/kl_k3"],
        "rollout/mismatch_sigma": sigma,
        "rollout/mismatch_outliers": outlier_share(*as_tensors(records), sigma),
    }


def _check_on_policy(run: Training, records: Sequence[SequenceRecord], rollout: Rollout) -> None:
    """S of the first update must be 0: old and new pass are the same pass.

    In FP8 what makes them differ (a stale copy of a weight, other packs) moves S by as much as learning does:
    the run stops. Otherwise it can only be kernels that add up in an order that changes: it is said.
    """
    worst = max((r for r in records if r.counts), key=lambda r: abs(r.log_ratio_sum), default=None)
    if worst is None or worst.log_ratio_sum == 0:
        return
    fp8 = run.inputs.config.fp8
    text = (
        f"step {run.step + 1}: S is not 0 before the first update, but {worst.log_ratio_sum:.3g} nats for "
        f"{rollout.name(worst.sample)} (L = {worst.length})"
    )
    if not fp8.on:
        run.log.say(f"{text}: kernels whose sums change from pass to pass")
        return
    raise TrainingError(
        f"{text}: with fp8.recipe = {fp8.recipe} the passes of old and new log-probs differ. Likeliest "
        "causes: one of them began without fresh FP8 copies of the weights, or had other packs. The last "
        "checkpoint is of before this step; fp8.recipe = none trains in bfloat16"
    )


def _update(run: Training, batches: Packs, *, on_policy: bool) -> tuple[Update, list[SequenceRecord]]:
    """One optimizer step, and the records of its sequences on all ranks."""
    mine: list[SequenceRecord] = []
    rank = run.groups.dp.rank()
    config = run.inputs.config.loss
    loss = PolicyLoss(
        objective=run.loss.objective(on_policy=on_policy),
        scoring=run.scoring,
        entropy_coef=config.entropy_coef,
        kl_coef=config.kl_coef,
        observer=lambda batch, terms: mine.extend(records_of(batch, terms, rank)),
    )
    update = run.policy.update(batches, loss)
    # Every context-parallel rank saw the whole of its sequences; of a pipeline, only the last stage did. What
    # follows on the records stops the run, so all have those of one rank.
    records = share(mine, group=run.groups.pp, source=-1)
    for group in (run.groups.tp, run.groups.cp):
        records = share(records, group=group)
    return update, gather_lists(records, group=run.groups.dp)


def observe(
    loss: LossState, records: Sequence[SequenceRecord], *, kl_k3: float, warm: bool, groups: ParallelGroups
) -> None:
    """Let the band learn from one off-policy mini-batch. The same band on every rank after it. Collective."""
    sums, lengths = as_tensors(records)
    loss.observe(sums, lengths, kl_k3=kl_k3, sigma=sigma_of(records), warm=warm)
    # Powers, means and medians of the same numbers, but perhaps on another processor: the first rank's.
    loss.load_state_dict(agreed(loss.state_dict(), groups))


def _check_finite(run: Training, records: Sequence[SequenceRecord], rollout: Rollout, *, of: int) -> int:
    """Name the dropped sequences of one optimizer step; stop the run when they are too many ``of`` all."""
    dropped = [record for record in records if record.nonfinite]
    for record in dropped[:8]:
        run.log.say(
            f"step {run.step + 1}: dropped a sequence that is not finite: {rollout.name(record.sample)} "
            f"(data-parallel rank {record.rank}, S = {record.log_ratio_sum}, L = {record.length})"
        )
    limit = run.inputs.config.loss.max_nonfinite_share
    if len(dropped) > limit * of:
        raise TrainingError(
            f"step {run.step + 1}: {len(dropped)} of {of} sequences of one optimizer step are not "
            f"finite; loss.max_nonfinite_share allows {limit}. Resume from the last checkpoint with a "
            "smaller optimizer.lr, or look for what makes the logits non-finite."
        )
    return len(dropped)
