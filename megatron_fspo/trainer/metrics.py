"""Metrics of a step: losses and clip rates of its optimizer steps, speed, and slow ranks; also its profile.

A rank may be slow because of a hot GPU, a shared core, or a bad memory module. Ranks are compared by their
time per token for forward and backward on their own micro-batches: on a CPU the main thread's CPU time, which
excludes waits; on a GPU the time until the rank reaches the gradient reduction. On GPUs, the ranks of a model
copy wait for each other within that time, so a slow rank makes its whole copy slow, and all are named.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean, median_low
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron_fspo.config import Config
from megatron_fspo.job.rank_status import named_ranks
from megatron_fspo.mcore.machine.backend import Backend, peak_tflops
from megatron_fspo.mcore.model.policy import Policy
from megatron_fspo.mcore.model.router import REPORT
from megatron_fspo.packing.pack import PackLayout
from megatron_fspo.parallel.control import Control
from megatron_fspo.parallel.groups import ParallelGroups, Totals, any_rank, gather_lists, means, pool
from megatron_fspo.record.log import RunLog
from megatron_fspo.record.records import as_tensors, clip_metrics, estimate_sigma
from megatron_fspo.record.rows import PHASES
from megatron_fspo.trainer.batch import TrainingBatch
from megatron_fspo.trainer.mismatch import outlier_share
from megatron_fspo.trainer.optimize import OptimizerStep
from megatron_fspo.trainer.prepare import Inputs
from megatron_fspo.trainer.rollout import Rollout, left_out
from megatron_fspo.trainer.training import State, Training
from megatron_fspo.weights.flops import BACKWARD, forward_flops

OFF_POLICY = ("actor/ppo_kl", "fspo/kl_k3")
"""Metrics that compare the policy with the old one."""
SLOW_RATIO = 1.3
"""A rank is slow from this multiple of the median time per token."""
SLOW_STEPS = 3
"""Number of consecutive slow steps after which the run warns."""
ROUTE_FALLBACK = 0.05
"""Share of responses without routes above which the run warns."""
PROFILE_WISH = "profile"
"""File in the run folder that requests a profile of the next step; the first rank removes it."""


def update_metrics(run: Training, batch: TrainingBatch, steps: Sequence[OptimizerStep]) -> dict[str, float]:
    """Return metrics of the optimizer steps on a rollout, after the last one, and log its sequences."""
    config, log, number = run.inputs.config, run.log, run.state.step + 1
    updates, loss = [step.update for step in steps], run.state.loss
    # Without rollouts, there is no old policy.
    off_policy = [
        record for step in steps if not (step.on_policy or config.supervised) for record in step.records
    ]
    turns = None if run.inputs.environment is None else batch.rollout.turns.tolist()
    log.sequences(number, off_policy, turns)
    if tokens := [piece for step in steps for piece in step.tokens]:
        log.tokens(number, tokens)
    norms = [update.grad_norm for update in updates if math.isfinite(update.grad_norm)] or [math.nan]
    on_policy = sum(step.on_policy for step in steps)
    metrics = pooled_metrics([update.totals for update in updates], on_policy=on_policy) | {
        "actor/grad_norm": fmean(norms),
        "actor/grad_norm/max": max(norms),
        "actor/lr": updates[-1].learning_rate,
        "actor/skipped_updates": float(sum(update.skipped for update in updates)),
        "fspo/nonfinite": float(sum(len(step.nonfinite) for step in steps)),
    }
    reports = [step.routers for step in steps if step.routers is not None]
    if reports:
        report = torch.stack(reports).sum(0).cpu()
        log.routers(number, report[:, : -len(REPORT)])
        metrics |= router_metrics(report, batch, sum(step.num_sequences for step in steps), log, number)
    if config.fp8.recipe != "none":
        metrics["fspo/fp8_modules"] = float(run.fp8_modules)
    if config.supervised:
        return {name: value for name, value in metrics.items() if name not in ("actor/kl_loss", *OFF_POLICY)}
    band = loss.metrics()
    clips = clip_metrics(
        off_policy,
        measured=[record for step in steps if step.measured for record in step.records],
        samples=config.samples,
        seed=config.run.seed,
        exponent=band.get("fspo/exponent", 0.5),
    )
    for topic, text in loss.width_warnings(clips | band, warm=batch.warm).items():
        log.warn_once(topic, f"step {number}: {text}")
    counted = [record for record in off_policy if record.counts]
    clips |= loss.noise_metrics(as_tensors(counted)[1], clips.get("fspo/out_of_band", math.nan))
    return (
        metrics | _first_metrics(steps[0], sampled=config.rollout.old_log_probs == "sampled") | clips | band
    )


def _first_metrics(first: OptimizerStep, *, sampled: bool) -> dict[str, float]:
    """Return metrics of the first optimizer step, in which S must be 0. With old log-probs from the sampler
    there is no old pass, so S of the first mini-batch measures the mismatch instead."""
    records, metrics = first.records, first.update.metrics
    if sampled:
        sigma = estimate_sigma(records) or math.nan
        return {
            "rollout/kl_k1": metrics["actor/ppo_kl"],
            "rollout/kl_k3": metrics["fspo/kl_k3"],
            "rollout/mismatch_sigma": sigma,
            "rollout/mismatch_outliers": outlier_share(*as_tensors(records), sigma),
        }
    largest = max((abs(r.log_ratio_sum) for r in records if r.counts), default=math.nan)
    on_policy = {f"{name}/on_policy": metrics[name] for name in OFF_POLICY}
    return {"fspo/on_policy_abs_s_max": largest, **on_policy}


def router_metrics(
    report: Tensor, batch: TrainingBatch, sequences: int, log: RunLog, step: int
) -> dict[str, float]:
    """Return metrics of a mixture of experts, over all tokens in a step's packs. ``report`` [layers, E + 6]
    is the sum of the reports of its optimizer steps, on this number of ``sequences``.

    Returns:
        ``router/load_max`` and ``/mean``: tokens of a layer's busiest expert over the layer's mean, maximum
        and mean over layers; ``router/idle``: share of experts without tokens; ``router/entropy`` of the
        scores, nats per token and layer; ``router/aux_loss`` and ``router/z_loss`` without coefficients, per
        sequence and layer; ``actor/route_flips``: share of (token, layer) for which the router would choose
        other experts than in the old pass; ``rollout/route_flips``: the same for the old pass and the
        sampler; NaN if nothing was compared. If the sampler's routes are replayed,
        ``rollout/route_fallback``: share of responses without routes; warns if there are many.
    """
    report = report[report[:, : -len(REPORT)].any(1)]  # without layers that have an MLP
    load = report[:, : -len(REPORT)]
    tokens, entropy, aux_loss, z_loss, flips, compared = report[:, -len(REPORT) :].sum(0)
    over = load.amax(1) / load.mean(1)
    pairs = {
        "router/load_max": (over.max(), 1),
        "router/load_max/mean": (over.mean(), 1),
        "router/idle": ((load == 0).sum(), load.numel()),
        "router/entropy": (entropy, tokens),
        "router/aux_loss": (aux_loss, sequences * len(load)),
        "router/z_loss": (z_loss, sequences * len(load)),
        "actor/route_flips": (flips, compared),
    }
    if batch.routers is not None:
        pairs["rollout/route_flips"] = tuple(batch.routers[:, -2:].sum(0).tolist())
    routed = batch.rollout.routed
    if routed.any():
        without = int((routed < 0).sum())
        pairs["rollout/route_fallback"] = (without, len(routed))
        if without > ROUTE_FALLBACK * len(routed):
            why = batch.rollout.route_problem or "only other ranks know the reason"
            text = f"{without} of {len(routed)} responses have no routes from the sampler: {why}"
            log.remind("rollout/route_fallback", step, text)
    return means({name: (float(total), float(count)) for name, (total, count) in pairs.items()})


def pooled_metrics(updates: Sequence[Totals], *, on_policy: int) -> dict[str, float]:
    """Return metrics of several optimizer steps, as ratios of sums: they do not depend on mini-batch splits.

    ============================================  ==========  ====================================
    metric                                        mean over   of the optimizer steps
    ============================================  ==========  ====================================
    ``actor/pg_loss``                             sequences   all
    ``actor/entropy``, ``actor/kl_loss``          tokens      all
    ``actor/ppo_kl``, ``fspo/kl_k3``              tokens      off-policy
    ============================================  ==========  ====================================

    The first optimizer step of a rollout is on-policy: old and new log-probs are equal, and their difference
    is 0. The last row excludes on-policy steps, and is NaN without others; :func:`update_metrics` reports the
    first step separately. With old log-probs from the sampler, all steps are off-policy.

    Args:
        updates: totals of the optimizer steps, in their order.
        on_policy: number of on-policy steps at the start: the steps skipped before the policy moved, and the
            first step that moves it.
    """
    off_policy = means(pool(updates[on_policy:]))
    return means(pool(updates)) | {name: off_policy.get(name, math.nan) for name in OFF_POLICY}


def speed_metrics(
    inputs: Inputs, layout: PackLayout, rollout: Rollout, timings: Mapping[str, float]
) -> dict[str, float]:
    """Return tokens per second, in total and per GPU, and the model FLOP/s utilization (MFU) if known, from
    the seconds of the step and its update in ``timings``."""
    ranks, seconds, config = dist.get_world_size(), timings["timing_s/step"], inputs.config
    tokens = int((rollout.prompt_lengths + rollout.response_lengths).sum())
    metrics = {
        "perf/throughput": tokens / seconds,
        "perf/tokens_per_second_per_gpu": tokens / seconds / ranks,
    }
    peak = config.log.peak_tflops or peak_tflops(inputs.backend, inputs.dtype)
    if peak is None:
        return metrics
    packed = ~left_out(config, rollout)
    prompts = torch.arange(len(rollout))[packed] // rollout.samples
    flops = forward_flops(
        inputs.arch,
        rollout.prompt_lengths[packed].tolist(),
        rollout.response_lengths[packed].tolist(),
        prompts.tolist() if layout.share_prompts else None,
        rollout.lengths[packed].tolist(),
    )
    flops *= (1 + BACKWARD) * config.batch.epochs
    return metrics | {"perf/mfu": flops / timings["timing_s/update_actor"] / (ranks * peak * 1e12)}


def table(steps: Sequence[Mapping[str, float]]) -> str:
    """Format the mean time of each phase as a table, from the metrics of steps; "" without steps."""
    steps = [row for row in steps if row.get("timing_s/step")]
    if not steps:
        return ""

    def mean(name: str) -> float:
        return sum(row.get(name, 0.0) for row in steps) / len(steps)

    # Tokens per step and rank.
    tokens = sum(row["perf/tokens_per_second_per_gpu"] * row["timing_s/step"] for row in steps) / len(steps)
    lines = [
        f"{f'phase, mean of {len(steps)} steps':<28}{'s':>9}{'share':>8}{'tokens/s per rank':>19}{'MFU':>8}"
    ]
    rows = [(words, f"timing_s/{name}") for name, words in PHASES.items()] + [("step", "timing_s/step")]
    for words, name in rows:
        seconds = mean(name)
        if seconds > 0:
            mfu = mean("perf/mfu") if name == "timing_s/update_actor" else 0.0
            cells = f"{seconds:>9.2f}{seconds / mean('timing_s/step'):>8.0%}{tokens / seconds:>19,.0f}"
            lines.append(f"{words:<28}{cells}{f'{mfu:>8.1%}' if mfu else ''}")
    return "\n".join(lines)


class Pace(NamedTuple):
    """The speed and memory of a rank in one step."""

    seconds: float
    """Seconds per token of its own forward and backward passes."""
    stage: int
    """Pipeline stage; only ranks of the same stage are compared, as stages have different work."""
    host: str
    use: Mapping[str, float]
    """:meth:`Backend.use`."""


def rank_metrics(
    policy: Policy, groups: ParallelGroups, state: State, log: RunLog, tokens: int
) -> dict[str, float]:
    """Return the slowest rank, its slowness, the largest memory of a rank and the mean use of the GPUs; warn
    about ranks slow for several steps. ``tokens``: those of this rank's passes in this step. Collective."""
    world = dist.group.WORLD
    assert world is not None
    seconds = policy.busy_seconds / max(tokens, 1)
    mine = Pace(seconds, groups.pp.rank(), socket.gethostname(), policy.backend.use())
    policy.busy_seconds = 0.0
    paces = gather_lists([mine], group=world)
    over = ratios(paces)
    slow = [rank for rank, ratio in enumerate(over) if ratio >= SLOW_RATIO]
    state.slow_for = {rank: state.slow_for.get(rank, 0) + 1 for rank in slow}
    for host, line in lines(state.slow_for, over, paces).items():
        log.remind(f"slow ranks on {host}", state.step + 1, line)
    slowest = max(range(len(over)), key=over.__getitem__)
    uses = {name: [pace.use.get(name, math.nan) for pace in paces] for name in mine.use}
    use = {name: (fmean if "utilization" in name else max)(values) for name, values in uses.items()}
    return {"perf/slowest_rank": float(slowest), "perf/slowest_rank_over_median": over[slowest], **use}


def ratios(paces: Sequence[Pace]) -> list[float]:
    """Return each rank's seconds per token over the median of its pipeline stage."""
    stages = {pace.stage: [other.seconds for other in paces if other.stage == pace.stage] for pace in paces}
    medians = {stage: median_low(seconds) for stage, seconds in stages.items()}
    # The median is 0 if the stage had no tokens.
    return [pace.seconds / medians[pace.stage] if medians[pace.stage] else 1.0 for pace in paces]


def lines(slow_for: Mapping[int, int], over: Sequence[float], paces: Sequence[Pace]) -> dict[str, str]:
    """Return host → a warning about its ranks that have been slow for at least :data:`SLOW_STEPS` steps."""
    by_host: dict[str, list[int]] = {}
    for rank, steps in sorted(slow_for.items()):
        if steps >= SLOW_STEPS:
            by_host.setdefault(paces[rank].host, []).append(rank)
    said = {}
    for host, ranks in by_host.items():
        ratio, steps = max(over[rank] for rank in ranks), min(slow_for[rank] for rank in ranks)
        said[host] = (
            f"{named_ranks(ranks)} on {host} took {ratio:.2f} times the median time per token in forward and "
            f"backward for {steps} steps in a row; all other ranks wait for this"
        )
    return said


@contextmanager
def profiled(config: Config, backend: Backend, control: Control, log: RunLog, step: int) -> Iterator[None]:
    """Context manager to record a step with torch's profiler if a profile was requested. Collective.

    The key ``log.profile`` requests a range of steps; a file ``profile`` in the run folder requests the next
    step. Each rank writes ``profiles/step_000012/rank_00003.json.gz``, for Perfetto or chrome://tracing.
    """
    first, last = config.log.profile or (0, 0)
    # Outside of collectives, as the first rank may still write metrics and remove old checkpoints.
    control.barrier("the first rank to write its records")
    wish = config.run_folder / PROFILE_WISH
    wished = dist.get_rank() == 0 and wish.exists()
    if wished:
        wish.unlink(missing_ok=True)
    if not (any_rank(wished, device=backend.device) or first <= step <= last):
        yield
        return
    activities = [ProfilerActivity.CPU]
    if backend.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        yield
    path = config.run_folder / f"profiles/step_{step:06d}/rank_{dist.get_rank():05d}.json.gz"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(path))
    except (OSError, RuntimeError) as error:  # a full disk must not end the run
        log.say(f"step {step}: {path} could not be written: {error}")
        return
    log.say(f"step {step}: profiled, see {path.parent}")
