"""The micro-batches of a step, with the log-probs that its loss needs from other passes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from megatron_fspo.config import Config
from megatron_fspo.mcore.model.lora import without_adapters
from megatron_fspo.packing.batch import MicroBatches
from megatron_fspo.trainer.correction import correct, little_is_left
from megatron_fspo.trainer.mismatch import make_alarm, measure
from megatron_fspo.trainer.rollout import Rollout, make_mini_batches, make_routing, staleness_metrics
from megatron_fspo.trainer.training import Training


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """What a step trains on."""

    rollout: Rollout
    """The responses, without their tokens, which are in the micro-batches."""
    micro_batches: MicroBatches
    """The micro-batches of all mini-batches, with their old log-probs."""
    sizes: list[int]
    """Number of micro-batches of each mini-batch."""
    on_policy: bool
    """True if S = 0 until an optimizer step moves the policy."""
    stale: bool
    """True if older weights sampled some of the tokens."""
    warm: bool
    """True if the step began after the learning rate's warm-up."""
    routers: Tensor | None = None
    """Report of the routers in the old pass; None without an old pass or without experts."""

    @property
    def mini_batches(self) -> list[MicroBatches]:
        """The micro-batches of each optimizer step."""
        ends = [sum(self.sizes[: i + 1]) for i in range(len(self.sizes))]
        return [self.micro_batches[end - size : end] for end, size in zip(ends, self.sizes, strict=True)]


def pack_and_score(run: Training, responses: Rollout) -> tuple[TrainingBatch, dict[str, float]]:
    """Return the micro-batches of these responses, and metrics. They have old log-probs unless they equal the
    new ones; the weights of a correction; and for a KL penalty the reference policy's log-probs. Collective.
    """
    config, log = run.inputs.config, run.log
    if run.teacher is not None:
        with log.phase("ref", len(responses.held), "response") as progress:
            responses = replace(responses, held=run.teacher.score(responses, progress))
    if config.teacher.urls:
        run.groups.control.barrier("the teacher's log-probs")
    metrics = staleness_metrics(responses, run.state.step, limit=config.rollout.max_staleness)
    routing = make_routing(config, run.inputs.arch)
    micro_batches, sizes = make_mini_batches(
        config, responses, run.groups, run.layout, routing=routing, layers=run.policy.layers
    )
    batch = TrainingBatch(
        rollout=replace(responses, held={}, grades={}),
        micro_batches=micro_batches,
        sizes=sizes,
        on_policy=config.rollout.old_log_probs != "sampled",
        stale=metrics["rollout/staleness/max"] > 0,
        warm=run.policy.optimizer_steps >= config.optimizer.warmup_steps,
    )
    if not batch.on_policy:
        sampled = [micro_batch.sampled_log_probs for micro_batch in micro_batches]
        batch = replace(batch, micro_batches=micro_batches.with_columns(old_log_probs=sampled))
    elif needs_old_pass(config):
        batch, scores = _score_old(run, batch)
        metrics |= scores
    if config.loss.kl_coef and not config.teacher.urls:
        # With LoRA the reference is the policy without its adapters; otherwise it is a second model.
        reference = run.reference or run.policy
        scoring = replace(run.scoring, vocab_size=reference.arch.vocab_size)
        with log.phase("ref", len(micro_batches), "pack") as progress, without_adapters(run.policy.chunks):
            scored = reference.score(batch.micro_batches, scoring)
            progress(len(micro_batches))
        batch = replace(batch, micro_batches=batch.micro_batches.with_columns(reference_log_probs=scored))
    return batch, metrics


def needs_old_pass(config: Config) -> bool:
    """Return True if the trainer scores the responses before the first update. With one optimizer step per
    rollout this only serves to measure the mismatch with vLLM, or for a correction."""
    if config.rollout.old_log_probs == "sampled" or config.supervised:
        return False
    several = config.batch.mini_batches * config.batch.epochs > 1
    return several or config.rollout.engine == "vllm" or config.correction.name != "none"


def _score_old(run: Training, batch: TrainingBatch) -> tuple[TrainingBatch, dict[str, float]]:
    """Score the responses before the first update, and compare the log-probs with the sampler's. Return the
    batch with old log-probs and rollout weights, and metrics of mismatch and correction. Collective."""
    config, log, step = run.inputs.config, run.log, run.state.step
    with log.phase("old_log_prob", len(batch.micro_batches), "pack") as progress:
        routed, passes = run.policy.with_routers(batch.micro_batches, replay=config.moe.replay == "rollout")
        micro_batches = batch.micro_batches.with_columns(old_log_probs=run.policy.score(routed, run.scoring))
        if passes is not None:
            batch = replace(batch, routers=passes.report())
            micro_batches = micro_batches.with_columns(routes=passes.routes())
        progress(len(micro_batches))
    alarm = make_alarm(config, batch.rollout, step, run.groups, run.inputs.dtype, run.inputs.backend.device)
    mismatch = measure(micro_batches, len(batch.rollout), group=run.groups.dp_cp, also=alarm.add)
    metrics, text = alarm.check()
    if text is not None:
        log.warn("sampler and trainer differ", f"step {step + 1}: {text}")
    metrics = mismatch.metrics | metrics
    if config.correction.name != "none":
        micro_batches, corrected = correct(config.correction, micro_batches, mismatch, groups=run.groups)
        metrics |= corrected
        if (text := little_is_left(config.correction, metrics)) is not None:
            log.remind("correction", step + 1, text)
    return replace(batch, micro_batches=micro_batches), metrics
