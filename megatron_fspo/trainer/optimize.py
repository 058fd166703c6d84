"""The optimizer steps on one rollout, and what they report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_fspo.config import Config
from megatron_fspo.errors import TrainingError
from megatron_fspo.mcore.policy import Update
from megatron_fspo.mcore.policy_loss import Observer, PolicyLoss
from megatron_fspo.mismatch.alarm import FP8_LIMIT, LIMIT, FreshTokens, Setting, check_mismatch
from megatron_fspo.mismatch.correction import correct, little_is_left
from megatron_fspo.mismatch.measure import measure, outlier_share
from megatron_fspo.packing.pack import Packs
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.parallel.metrics import Totals, agreed, gather_lists, means, pool, share
from megatron_fspo.record.records import SequenceRecord, as_tensors, clip_metrics, records_of, sigma_of
from megatron_fspo.trainer.build import Training
from megatron_fspo.trainer.limits import check_kl, is_to_be_skipped
from megatron_fspo.trainer.losses import LossState
from megatron_fspo.trainer.noise import noise_metrics
from megatron_fspo.trainer.nonfinite import check_finite, drop_from_old_pass, drop_from_update
from megatron_fspo.trainer.rollout import Rollout
from megatron_fspo.trainer.step import Step

OFF_POLICY = ("actor/ppo_kl", "fspo/kl_k3")
"""Metrics that compare the policy with the old one."""


def needs_old_pass(config: Config) -> bool:
    """Whether the trainer scores the responses before the first update.

    Before a single optimizer step old and new log-probs are the same. But a sampler apart from the trainer is
    to be measured all the same, and a correction needs the measurement.
    """
    if config.rollout.old_log_probs == "sampled":
        return False
    several = config.batch.mini_batches * config.batch.epochs > 1
    return several or config.rollout.engine == "vllm" or config.correction.name != "none"


def add_old_log_probs(run: Training, step: Step) -> None:
    """Give the packs the log-probs that S starts from, as ``rollout.old_log_probs`` has them. Collective.

    They get none where these equal the new ones. A pass also gives them the weights of a correction, and the
    step the metrics of the pass.
    """
    config = run.inputs.config
    if config.rollout.old_log_probs == "sampled":
        step.packs = step.packs.with_columns(old_log_probs=[batch.sampled_log_probs for batch in step.packs])
    elif needs_old_pass(config):
        score_old(run, step)


def score_old(run: Training, step: Step) -> None:
    """Log-probs before the first update, with the packs of the training pass; compared with the sampler's.

    Gives the packs old log-probs and rollout weights, and the step the metrics of mismatch and correction.
    """
    with run.log.phase("old_log_prob", len(step.packs), "pack", run.timings) as progress:
        step.packs = step.packs.with_columns(old_log_probs=run.policy.score(step.packs, run.scoring))
        if drop_from_old_pass(run, step):
            # Old and new pass see the same packs.
            step.packs = step.packs.with_columns(old_log_probs=run.policy.score(step.packs, run.scoring))
        progress(len(step.packs))
    setting = _alarm_setting(run)
    fresh = FreshTokens(step.rollout.fresh_from(run.step), setting)
    mismatch = measure(step.packs, len(step.rollout), group=run.groups.dp_cp, also=fresh.add)
    alarm, text = check_mismatch(step.packs, fresh, setting)
    if text is not None:
        run.log.warn("sampler and trainer differ", f"step {run.step + 1}: {text}")
    rule = run.inputs.config.correction
    step.packs, correction = correct(rule, step.packs, mismatch, groups=run.groups)
    metrics = mismatch.metrics | alarm | correction
    if (text := little_is_left(rule, metrics)) is not None:
        run.log.remind("correction", run.step + 1, text)
    step.metrics |= metrics


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
    """Take the optimizer steps of a step: every mini-batch, ``batch.epochs`` times. Collective.

    When the job is asked to stop after the first of them, the weights have moved. Where the steps before are
    saved, this one is thrown away at once: it can be made again. Where they are not, it is finished first.

    Returns:
        False where the step was thrown away.
    """
    turns = len(step.sizes) * run.inputs.config.batch.epochs
    with run.log.phase("update_actor", turns, "step", run.timings) as progress:
        while len(step.updates) < turns:
            on_policy = _is_on_policy(run, step)
            update, records = _update(run, step)
            if not step.updates:  # the weights are still those of the old pass
                step.first = _first_update(update, records, sampled=not on_policy)
            if on_policy:
                _check_on_policy(run, records, step.rollout)
            else:
                step.off_policy += records
                kl_k3 = update.metrics["fspo/kl_k3"]
                told = run.loss.calibrated()
                observe(run.loss, records, kl_k3=kl_k3, warm=step.warm, groups=run.groups)
                if (text := run.loss.calibrated()) != told:
                    run.log.say(f"step {run.step + 1}: the band from here on: {text}")
            step.updates.append(update)
            progress(1)
            if run.saved == run.step and len(step.updates) < turns and run.stopping():
                return False
    return True


def update_metrics(run: Training, step: Step) -> dict[str, float]:
    """What the optimizer steps of a step report, once all are taken."""
    updates = step.updates
    run.log.sequences(run.step + 1, step.off_policy)
    on_policy = _on_policy_updates(run, step)
    metrics = pooled_metrics([update.totals for update in updates], on_policy=on_policy) | {
        "actor/grad_norm": sum(update.grad_norm for update in updates) / len(updates),
        "actor/grad_norm/max": max(update.grad_norm for update in updates),
        "actor/lr": updates[-1].learning_rate,
        "fspo/nonfinite": float(step.nonfinite),
    }
    if run.spikes.on:
        metrics["actor/skipped_updates"] = float(sum(update.skipped for update in updates))
    if run.inputs.config.fp8.on:
        metrics["fspo/fp8_modules"] = float(run.fp8_modules)
    band = run.loss.metrics()
    clips = clip_metrics(
        step.off_policy, seed=run.inputs.config.run.seed, exponent=band.get("fspo/exponent", 0.5)
    )
    for topic, text in run.loss.doubts(clips | band, warm=step.warm).items():
        run.log.warn_once(topic, f"step {run.step + 1}: {text}")
    clips |= noise_metrics(run.inputs.noise, step.off_policy, run.loss.objective())
    return metrics | step.first | clips | band


def pooled_metrics(updates: Sequence[Totals], *, on_policy: int) -> dict[str, float]:
    """Metrics of several optimizer steps as one: sums over sums, so that no split into mini-batches shows.

    ============================================  ==========  ====================================
    metric                                        mean over   of the optimizer steps
    ============================================  ==========  ====================================
    ``actor/pg_loss``                             sequences   all
    ``actor/entropy``, ``actor/kl_loss``          tokens      all
    ``actor/ppo_kl``, ``fspo/kl_k3``              tokens      off-policy
    ============================================  ==========  ====================================

    The first optimizer step of a rollout is on-policy: old and new log-probs are the same, and what compares
    them is 0. It is left out of the last row, which is NaN where there is no other; :func:`_first_update`
    reports it. Where S starts from the sampler, all are off-policy.

    Args:
        on_policy: how many are, from the first: one, and one more for each that was skipped before the policy
            moved.
    """
    found = means(pool(updates))
    apart = means(pool(updates[on_policy:]))
    return found | {name: apart.get(name, math.nan) for name in OFF_POLICY}


def _first_update(update: Update, records: Sequence[SequenceRecord], *, sampled: bool) -> dict[str, float]:
    """What the first update of a rollout shows: no update has moved the policy yet.

    S must be 0 then. From the sampler's log-probs it is the mismatch instead, of the first mini-batch: all
    there is to measure it by without a pass.
    """
    if not sampled:
        largest = max((abs(r.log_ratio_sum) for r in records if r.counts), default=math.nan)
        alone = {f"{name}/on_policy": update.metrics[name] for name in OFF_POLICY}
        return {"fspo/on_policy_abs_s_max": largest} | alone
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


def _update(run: Training, step: Step) -> tuple[Update, list[SequenceRecord]]:
    """The next optimizer step, and the records of its sequences on all ranks.

    Sequences that had to leave the packs are not among them. The weights move only when the gradient is known
    to be finite. Until it is, what spoils it is dropped; a round without anything to drop is an error.
    """
    totals, records = _gradient(run, step)
    while not math.isfinite(grad_norm := run.policy.grad_norm()):
        drop_from_update(run, step, records, _loss(run, step, None))
        totals, records = _gradient(run, step)
    step.nonfinite += check_finite(run, step, records)
    check_kl(run, step, totals)
    if is_to_be_skipped(run, step, totals, grad_norm):
        return run.policy.skip(totals, grad_norm), records
    return run.policy.step(totals, grad_norm), records


def _gradient(run: Training, step: Step) -> tuple[Totals, list[SequenceRecord]]:
    """Backward on the next mini-batch: sums of its metrics, and the records of its sequences on all ranks."""
    mine: list[SequenceRecord] = []
    rank = run.groups.dp.rank()
    loss = _loss(run, step, lambda batch, terms: mine.extend(records_of(batch, terms, rank)))
    totals = run.policy.backward(step.mini_batch, loss)
    # Every context-parallel rank saw the whole of its sequences; of a pipeline, only the last stage did. What
    # follows on the records stops the run, so all have those of one rank.
    records = share(mine, group=run.groups.pp, source=-1)
    for group in (run.groups.tp, run.groups.cp):
        records = share(records, group=group)
    return totals, gather_lists(records, group=run.groups.dp)


def _is_on_policy(run: Training, step: Step) -> bool:
    """Whether the next update is one before which S = 0: nothing has moved the policy since the old pass."""
    none_taken = all(update.skipped for update in step.updates)
    return none_taken and run.inputs.config.rollout.old_log_probs != "sampled"


def _on_policy_updates(run: Training, step: Step) -> int:
    """How many of the updates were such."""
    if run.inputs.config.rollout.old_log_probs == "sampled":
        return 0
    taken = [number for number, update in enumerate(step.updates, 1) if not update.skipped]
    return taken[0] if taken else len(step.updates)


def _loss(run: Training, step: Step, observer: Observer | None) -> PolicyLoss:
    config = run.inputs.config.loss
    return PolicyLoss(
        objective=run.loss.objective(on_policy=_is_on_policy(run, step)),
        scoring=run.scoring,
        entropy_coef=config.entropy_coef,
        kl_coef=config.kl_coef,
        observer=observer,
    )


def observe(
    loss: LossState, records: Sequence[SequenceRecord], *, kl_k3: float, warm: bool, groups: ParallelGroups
) -> None:
    """Let the band learn from one off-policy mini-batch. The same band on every rank after it. Collective."""
    sums, lengths = as_tensors(records)
    loss.observe(sums, lengths, kl_k3=kl_k3, sigma=sigma_of(records), warm=warm)
    # Powers, means and medians of the same numbers, but perhaps on another processor: the first rank's.
    loss.load_state_dict(agreed(loss.state_dict(), groups))
