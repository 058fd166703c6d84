"""The optimizer steps on one rollout, and what they report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_fspo.config import Config
from megatron_fspo.errors import TrainingError
from megatron_fspo.mcore.policy import Update
from megatron_fspo.mcore.policy_loss import PolicyLoss
from megatron_fspo.packing.batch import MicroBatch
from megatron_fspo.parallel.metrics import gather_lists, share
from megatron_fspo.trainer.alarm import LIMIT, Setting, check_mismatch
from megatron_fspo.trainer.build import Training
from megatron_fspo.trainer.correction import correct
from megatron_fspo.trainer.mismatch import measure, mismatch_metrics
from megatron_fspo.trainer.records import SequenceRecord, as_tensors, clip_metrics, records_of, sigma_of
from megatron_fspo.types import Sample


def needs_old_pass(config: Config) -> bool:
    """Whether the trainer scores the responses before the first update.

    Before a single optimizer step old and new log-probs are the same. But a sampler apart from the trainer is
    to be measured all the same, and a correction needs the measurement.
    """
    if config.rollout.old_log_probs == "sampled":
        return False
    several = config.batch.mini_batches * config.batch.epochs > 1
    return several or config.rollout.engine == "vllm" or config.correction.name != "none"


def with_old_log_probs(
    run: Training, mini_batches: list[list[MicroBatch]], samples: Sequence[Sample]
) -> tuple[list[list[MicroBatch]], dict[str, float]]:
    """The log-probs that S starts from, as ``rollout.old_log_probs`` has them. Collective.

    Returns:
        the mini-batches with old log-probs (without, where they equal the new ones) and, after a pass, with
        the weights of a correction; and the metrics of the pass.
    """
    if run.inputs.config.rollout.old_log_probs == "sampled":
        return [[replace(b, old_log_probs=b.sampled_log_probs) for b in part] for part in mini_batches], {}
    return score_old(run, mini_batches, samples) if needs_old_pass(run.inputs.config) else (mini_batches, {})


def score_old(
    run: Training, mini_batches: list[list[MicroBatch]], samples: Sequence[Sample]
) -> tuple[list[list[MicroBatch]], dict[str, float]]:
    """Log-probs before the first update, with the packs of the training pass; compared with the sampler's.

    Returns:
        the mini-batches with old log-probs and rollout weights, and the metrics of mismatch and correction.
    """
    flat = [batch for batches in mini_batches for batch in batches]
    group = run.groups.dp_cp
    with run.log.phase("old_log_prob", len(flat), "pack", run.timings) as progress:
        scores = run.policy.score(flat, run.scoring)
        progress(len(flat))
    mismatch = measure(flat, scores, [len(s.completion.token_ids) for s in samples], group=group)
    metrics = mismatch_metrics(mismatch, flat, group=group)
    alarm, text = check_mismatch(flat, mismatch, samples, _alarm_setting(run))
    if text is not None:
        run.log.say(f"step {run.step + 1}: {text}")
    scored = [replace(batch, old_log_probs=score) for batch, score in zip(flat, scores, strict=True)]
    corrected, correction = correct(run.inputs.config.correction, scored, mismatch, group=group)
    remaining = iter(corrected)
    return [[next(remaining) for _ in part] for part in mini_batches], metrics | alarm | correction


def _alarm_setting(run: Training) -> Setting:
    rollout, parallel = run.inputs.config.rollout, run.inputs.config.parallel
    return Setting(
        version=run.step,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        limit=rollout.mismatch_limit or LIMIT[run.inputs.dtype],
        rescore=lambda batches, temperature: run.policy.score(
            batches, replace(run.scoring, temperature=temperature)
        ),
        # The interleaved schedule takes micro-batches by the number of stages.
        probe=parallel.pipeline if parallel.virtual_pipeline > 1 else 1,
        groups=run.groups,
    )


def score_reference(run: Training, mini_batches: list[list[MicroBatch]]) -> list[list[MicroBatch]]:
    """Log-probs under the reference policy, for the KL penalty."""
    assert run.reference is not None
    flat = [batch for batches in mini_batches for batch in batches]
    with run.log.phase("ref", len(flat), "pack", run.timings) as progress:
        scores = run.reference.score(flat, run.scoring)
        progress(len(flat))
    remaining = iter(scores)
    return [[replace(batch, reference_log_probs=next(remaining)) for batch in part] for part in mini_batches]


def optimize(
    run: Training, mini_batches: list[list[MicroBatch]], samples: Sequence[Sample]
) -> dict[str, float]:
    """All optimizer steps of one rollout: every mini-batch, ``batch.epochs`` times. Collective."""
    config = run.inputs.config
    updates: list[Update] = []
    off_policy: list[SequenceRecord] = []
    nonfinite = 0
    first: dict[str, float] = {}
    sampled = config.rollout.old_log_probs == "sampled"
    warm = run.policy.optimizer_steps >= config.optimizer.warmup_steps
    total = config.batch.epochs * len(mini_batches)
    with run.log.phase("update_actor", total, "step", run.timings) as progress:
        for batches in mini_batches * config.batch.epochs:
            update, records = _update(run, batches)
            nonfinite += _check_finite(run, records, samples)
            if not updates:  # the weights are still those of the old pass
                first = _first_update(update, records, sampled=sampled)
            if updates or sampled:
                off_policy += records
            if updates:
                sums, lengths = as_tensors(records)
                kl_k3 = update.metrics["fspo/kl_k3"]
                run.loss.observe(sums, lengths, kl_k3=kl_k3, sigma=sigma_of(records), warm=warm)
            updates.append(update)
            progress(1)
    run.log.sequences(run.step + 1, off_policy)
    metrics = {
        name: sum(update.metrics[name] for update in updates) / len(updates) for name in updates[0].metrics
    }
    metrics |= {
        "actor/grad_norm": sum(update.grad_norm for update in updates) / len(updates),
        "actor/grad_norm/max": max(update.grad_norm for update in updates),
        "actor/lr": updates[-1].learning_rate,
        "fspo/nonfinite": float(nonfinite),
    }
    return metrics | first | clip_metrics(off_policy, seed=config.run.seed) | run.loss.metrics()


def _first_update(update: Update, records: Sequence[SequenceRecord], *, sampled: bool) -> dict[str, float]:
    """What the first update of a rollout shows: no update has moved the policy yet.

    S must be 0 then. From the sampler's log-probs it is the mismatch instead, of the first mini-batch: all
    there is to measure it by without a pass.
    """
    if not sampled:
        largest = max((abs(r.log_ratio_sum) for r in records if r.counts), default=math.nan)
        return {"fspo/on_policy_abs_s_max": largest}
    return {
        "rollout/kl_k1": update.metrics["actor/ppo_kl"],
        "rollout/kl_k3": update.metrics["fspo/kl_k3"],
        "rollout/mismatch_sigma": sigma_of(records) or math.nan,
    }


def _update(run: Training, batches: list[MicroBatch]) -> tuple[Update, list[SequenceRecord]]:
    """One optimizer step, and the records of its sequences on all ranks."""
    mine: list[SequenceRecord] = []
    rank = run.groups.dp.rank()
    config = run.inputs.config.loss
    loss = PolicyLoss(
        objective=run.loss.objective(),
        scoring=run.scoring,
        entropy_coef=config.entropy_coef,
        kl_coef=config.kl_coef,
        observer=lambda batch, terms: mine.extend(records_of(batch, terms, rank)),
    )
    update = run.policy.update(batches, loss)
    # Every context-parallel rank saw the whole of its sequences; of a pipeline, only the last stage did.
    records = share(mine, group=run.groups.pp, source=-1)
    return update, gather_lists(records, group=run.groups.dp)


def _check_finite(run: Training, records: Sequence[SequenceRecord], samples: Sequence[Sample]) -> int:
    """Name the dropped sequences of one optimizer step; stop the run when they are too many."""
    dropped = [record for record in records if record.nonfinite]
    for record in dropped[:8]:
        sample = samples[record.sample]
        run.log.say(
            f"step {run.step + 1}: dropped a sequence that is not finite: prompt {sample.prompt.index}, "
            f"response {sample.number} (data-parallel rank {record.rank}, S = {record.log_ratio_sum}, "
            f"L = {record.length})"
        )
    limit = run.inputs.config.loss.max_nonfinite_share
    if len(dropped) > limit * len(records):
        raise TrainingError(
            f"step {run.step + 1}: {len(dropped)} of {len(records)} sequences of one optimizer step are not "
            f"finite; loss.max_nonfinite_share allows {limit}. Resume from the last checkpoint with a "
            "smaller optimizer.lr, or look for what makes the logits non-finite."
        )
    return len(dropped)
