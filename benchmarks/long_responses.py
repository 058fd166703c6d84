"""How S grows with length in a really pretrained model, up to 2,000 tokens: noise, and what updates move.

    make runs/smollm2/checkpoint/config.json vllm
    VLLM_BIN=.venv-vllm/bin/vllm python benchmarks/long_responses.py     # an hour or two on two cores
    python benchmarks/long_responses.py --short                          # the machinery, on make-sum's model

SmolLM2-135M answers short and long questions, in a vLLM server. Its responses are scored with the sampler's
weights in float32 and in bfloat16, and again after one and after three optimizer steps of the trainer on
parts of them. Three differences are S of each response: of precision alone, and of the updates. Token by
token they go to runs/evidence/long_responses/tokens.npz, which is not made twice; what comes of it to
benchmarks/results/long_responses.json.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from machine import ROOT, cpu, options_of, vllm_server
from megatron_fspo.config import Config
from megatron_fspo.config.loading import load_config
from megatron_fspo.evaluation.intervals import (
    Estimate,
    jackknife_interval,
    wilson_interval,
)
from megatron_fspo.lab.explain.decomposition import Decomposition, Halves, decompose, split_halves
from megatron_fspo.lab.explain.losses import factor_for
from megatron_fspo.lab.sweep.summary import as_json
from megatron_fspo.objective import FSPOBand, length_reweighting_error
from megatron_fspo.objective.calibration import fit_exponent, jackknife, measure_exponent, student_t
from megatron_fspo.objective.fairness import LengthReweightingError, length_bins
from megatron_fspo.types import Completion, Prompt
from noise_check import difference_interval, rates_as_of

CONFIG = ROOT / "benchmarks/long_responses.toml"
TOPICS = ("the sea", "a railway", "bread", "the moon", "a garden", "an old library", "winter", "a clock")
FORMS = (
    "Say something about {} in one or two sentences.",
    "Describe {} in three paragraphs.",
    "Write an essay about {}, with many sections.",
    "Write a very long and detailed story about {}, chapter by chapter.",
)
DIFFERENCES = {"noise": "bfloat16 less float32", "one": "one update", "three": "three updates"}
PORT = 8191
OUTSIDE = 0.2
"""Share outside of the band that is predicted for."""
BINS = 4
LEAST = 8
"""Responses of a bin that is looked at."""
LAGS = (1, 4, 16, 64, 128, 256, 512, 1024)


SHORT = (
    "--model.checkpoint examples/make_sum/checkpoint --data.train examples/make_sum/train.jsonl "
    "--data.max-prompt-tokens 4 --data.chat-template false --reward.name make_sum --rollout.samples 8 "
    "--rollout.max-response-tokens 100 --rollout.engine embedded --optimizer.lr 1e-4"
).split()


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What is kept in tokens.npz."""

    lengths: Tensor
    """[N] int64."""
    prompts: Tensor
    """[N] int64, the prompt of each."""
    tokens: Mapping[str, Tensor]
    """Of :data:`DIFFERENCES`, [T] response by response."""

    def save(self, path: Path) -> None:
        columns = {name: values.float().numpy() for name, values in self.tokens.items()}
        np.savez_compressed(path, lengths=self.lengths.numpy(), prompts=self.prompts.numpy(), **columns)


def load(path: Path) -> Recorded:
    """What :meth:`Recorded.save` wrote."""
    with np.load(path) as file:
        return Recorded(
            lengths=torch.from_numpy(file["lengths"]),
            prompts=torch.from_numpy(file["prompts"]),
            tokens={name: torch.from_numpy(file[name]).double() for name in DIFFERENCES},
        )


def variety(prompt: Prompt, completion: Completion, response: str) -> float:
    """Share of different words: what it rewards matters little here, but groups have variance."""
    words = response.lower().split()
    return len(set(words)) / len(words) if words else 0.0


def record(config: Config) -> Recorded:
    """Sample, score, update, and score again; one process of the trainer."""
    from megatron_fspo.mcore.model.policy import Model
    from megatron_fspo.mcore.state.hf_weights import export_hf, load_hf
    from megatron_fspo.trainer.advantages import add_advantages
    from megatron_fspo.trainer.batch import pack_and_score
    from megatron_fspo.trainer.build import build
    from megatron_fspo.trainer.optimize import OptimizerStep, update
    from megatron_fspo.trainer.prepare import prepare
    from megatron_fspo.trainer.rollout import make_mini_batches, with_advantages
    from megatron_fspo.trainer.sampling import collect_and_grade

    inputs = prepare(config, world_size=1)
    run = build(inputs)
    rollout = add_advantages(inputs, run.groups, collect_and_grade(inputs, run.groups, run.queue.take(0)))
    whole = config.model_copy(update={"batch": config.batch.model_copy(update={"mini_batches": 1})})
    # Any advantage but 0: micro-batches leave out what teaches nothing.
    everything = with_advantages(rollout, torch.ones(len(rollout)))
    micro_batches = make_mini_batches(whole, everything, run.groups, run.layout)[0]
    lengths = rollout.lengths

    def scored(model: Model) -> Tensor:
        return in_order(micro_batches, model.score(micro_batches, run.scoring), lengths)

    before = scored(run.policy)
    weights = config.run_folder / "weights"
    export_hf(run.policy, weights, source=config.model.checkpoint)
    coarse = Model(
        inputs.arch,
        inputs.backend,
        run.groups,
        parallel=config.parallel,
        dtype=torch.bfloat16,
        fp8=config.fp8,
    )
    load_hf(coarse, weights)
    found = {"noise": scored(coarse) - before}
    del coarse
    batch, _ = pack_and_score(run, rollout)
    steps: list[OptimizerStep] = []
    for mini_batch in batch.mini_batches[:3]:
        steps.append(update(run, batch, mini_batch, before=steps))
        print(f"update {len(steps)}: gradient norm {steps[-1].update.grad_norm:.3g}", flush=True)
        if len(steps) != 2:
            found["one" if len(steps) == 1 else "three"] = scored(run.policy) - before
    run.engine.close()
    run.log.close()
    prompts = torch.arange(len(rollout.prompts)).repeat_interleave(rollout.samples)
    return Recorded(lengths=lengths.long(), prompts=prompts, tokens=found)


def record_with_server() -> Recorded:
    """The run of long_responses.toml, and the server that it samples from."""
    os.environ["OMP_NUM_THREADS"] = str(os.cpu_count())  # one process has all of them
    config = load_config([CONFIG], [])
    log = ROOT / "runs/evidence/long_responses.vllm.log"
    with vllm_server(str(config.model.checkpoint), PORT, log, VLLM_CPU_KVCACHE_SPACE="6") as url:
        return record(load_config([CONFIG], ["--vllm.urls", f"['{url}']"]))


def in_order(micro_batches: Sequence[Any], columns: Sequence[Tensor], lengths: Tensor) -> Tensor:
    """[T] a column of the response tokens of all micro-batches, response by response."""
    starts = (lengths.cumsum(0) - lengths).long()
    found = torch.full((int(lengths.sum()),), math.nan, dtype=torch.float64)
    for batch, column in zip(micro_batches, columns, strict=True):
        for number, sample in enumerate(batch.sample_index.tolist()):
            mine = batch.loss_mask & (batch.segment == number)
            start = int(starts[sample])
            found[start : start + int(mine.sum())] = column[mine].double()
    assert found.isfinite().all()
    return found


def figures(tokens: Tensor, lengths: Tensor, prompts: Tensor) -> dict[str, Any]:
    """Of one difference: exponent, parts with intervals from prompts left out, and what the parts predict."""
    halves = split_halves(tokens, lengths)
    all_prompts, prompts = prompts, prompts[lengths > 1]
    sums = halves.log_ratio_sums
    exponent = measure_exponent(sums, halves.lengths, prompts)
    parts = decompose(halves)
    places = (50, int(halves.lengths.median()), int(halves.lengths.max()))

    left = [decompose(halves[prompts != number]) for number in prompts.unique().tolist()]

    def part(of: Callable[[Decomposition], float]) -> dict[str, Any]:
        return with_interval(of(parts), [of(one) for one in left])

    c = (sums.abs() / halves.lengths.sqrt()).quantile(1 - OUTSIDE).item()
    checks = predictions(halves, prompts, FSPOBand(c_low=c, c_high=c))
    return {
        "exponent": {"value": exponent.value, "interval": list(exponent.interval)},
        "noise": part(lambda one: one.noise),
        "signal": part(lambda one: one.signal),
        "drift": part(lambda one: one.drift),
        "crossover": parts.crossover,
        "exponents_at": [{"length": at, **part(lambda one, at=at: one.exponent(at))} for at in places],
        "autocorrelation": autocorrelation(tokens, lengths),
        "c": c,
        "checks": checks,
        "within": within_responses(tokens, lengths, all_prompts),
        "losses": evenness(tokens, lengths, all_prompts),
    }


def with_interval(value: float, left: Sequence[float]) -> dict[str, Any]:
    """A figure and its 95% interval, from its values with one prompt after the other left out."""
    return with_ends(jackknife_interval(value, left))


def with_ends(estimate: Estimate) -> dict[str, Any]:
    """As the results have it."""
    return {"value": estimate.value, "interval": [estimate.low, estimate.high]}


def evenness(tokens: Tensor, lengths: Tensor, prompts: Tensor) -> dict[str, Any]:
    """Of each loss with the width that leaves the same share outside: length reweighting error, and by how
    much it is above that of FSPO with a measured exponent; intervals from prompts left out."""
    found = {
        loss: spread / spread.new_tensor(factor_for(spread, OUTSIDE))
        for loss, spread in reaches(tokens, lengths, prompts).items()
    }

    def means(kept: Tensor) -> dict[str, float]:
        # The width of all: without a prompt another share is outside, and LRE goes with the share.
        return {loss: of(far[kept], lengths[kept]).mean for loss, far in found.items()}

    def of(far: Tensor, these: Tensor) -> LengthReweightingError:
        return length_reweighting_error(far <= 1, these, BINS, draws=0)

    whole = means(torch.ones_like(prompts, dtype=torch.bool))
    left = [means(prompts != number) for number in prompts.unique().tolist()]
    return {
        loss: {
            "outside": (far > 1).double().mean().item(),
            "lre_mean": with_interval(whole[loss], [one[loss] for one in left]),
            "lre_max": of(far, lengths).max,
            "lre_null": length_reweighting_error(far <= 1, lengths, BINS).null_mean,
            "above_measured": with_interval(
                whole[loss] - whole["measured"], [one[loss] - one["measured"] for one in left]
            ),
            "rates": [1 - one.accepted_rate for one in of(far, lengths).bins],
        }
        for loss, far in found.items()
    }


def reaches(tokens: Tensor, lengths: Tensor, prompts: Tensor) -> dict[str, Tensor]:
    """[N] by loss, |S| in units of L^a: how wide a band would have to be; CTPO's holds for all prefixes."""
    rows = tokens.split(lengths.tolist())
    sums = torch.stack([row.sum() for row in rows])
    even = half_of(prompts)
    measured = torch.zeros_like(sums)
    for mine in (even, ~even):
        measured[mine] = min(max(fit_exponent(sums[~mine], lengths[~mine], BINS), 0.5), 1.0)
    exponents = {"measured": measured, "fspo": 0.5, "rloo": 0.0, "gspo": 1.0}
    found = {loss: sums.abs() / lengths.double() ** a for loss, a in exponents.items()}
    prefixes = [row.cumsum(0).abs() / torch.arange(1, len(row) + 1).sqrt() for row in rows]
    return {**found, "ctpo": torch.stack([prefix.max() for prefix in prefixes])}


def half_of(prompts: Tensor) -> Tensor:
    """[N] bool, half of the prompts: neighbours ask for the same forms of different topics."""
    return prompts // len(FORMS) % 2 == 0


def predictions(halves: Halves, prompts: Tensor, band: FSPOBand) -> list[dict[str, Any]]:
    """By length: share outside, what the parts of the other half of the prompts predict for it, and the
    difference of the two with its interval."""
    low, high = band.bounds(halves.lengths.double())
    outside = ((halves.log_ratio_sums < low) | (halves.log_ratio_sums > high)).double()
    predicted = predicted_rates(halves, prompts, band)
    numbers = prompts.unique()
    without = [predicted_rates(halves, prompts, band, leave_out=number) for number in numbers.tolist()]
    quantile = student_t(len(numbers) - 1)
    found = []
    bins = length_bins(halves.lengths, BINS)
    for number in bins.unique().tolist():
        here = bins == number
        count, rate, told = int(here.sum()), outside[here].mean().item(), predicted[here].mean().item()
        if count < LEAST:
            continue
        half = quantile * jackknife([rates[here].mean().item() for rates in without])
        measured = wilson_interval(rate, count)
        expected = Estimate(value=told, low=max(told - half, 0.0), high=min(told + half, 1.0))
        difference = difference_interval(measured, expected)
        found.append(
            {
                "low": int(halves.lengths[here].min()),
                "high": int(halves.lengths[here].max()),
                "responses": count,
                "measured": with_ends(measured),
                "predicted": with_ends(expected),
                "difference": [difference.low, difference.high],
            }
        )
    return found


def predicted_rates(halves: Halves, prompts: Tensor, band: FSPOBand, leave_out: int | None = None) -> Tensor:
    """[N] of every response, from the parts of the half of the prompts that it is not in."""
    even = half_of(prompts)
    kept = torch.ones_like(even) if leave_out is None else prompts != leave_out
    predicted = torch.zeros(len(prompts), dtype=torch.float64)
    for mine in (even, ~even):
        predicted[mine] = rates_as_of(halves[~mine & kept], halves.lengths[mine], band)
    return predicted


def within_responses(tokens: Tensor, lengths: Tensor, prompts: Tensor) -> dict[str, Any]:
    """Exponent of the sums over the first tokens of the longest quarter: the same texts at every length.

    A line through log RMS of the sums against log of their length, at lengths a factor of 2 apart up to the
    upper quartile; its interval from prompts left out.
    """
    reach = int(lengths.double().quantile(0.75, interpolation="lower"))
    places = [reach >> shift for shift in range(5, -1, -1) if reach >> shift]
    long = lengths >= reach
    rows = [row for row, keep in zip(tokens.split(lengths.tolist()), long, strict=True) if keep]
    sums = torch.stack([row.cumsum(0)[torch.tensor(places) - 1] for row in rows])
    prompts = prompts[long]
    logs = torch.tensor(places, dtype=torch.float64).log()
    logs = logs - logs.mean()

    def slope(chosen: Tensor) -> float:
        return ((chosen.square().mean(0).log() / 2 * logs).sum() / logs.square().sum()).item()

    left = [slope(sums[prompts != number]) for number in prompts.unique().tolist()]
    return {
        **with_interval(slope(sums), left),
        "responses": len(rows),
        "from": places[0],
        "to": places[-1],
    }


def autocorrelation(tokens: Tensor, lengths: Tensor) -> Mapping[str, float]:
    """Lag → correlation of tokens of one response so far apart, all responses together."""
    rows = [row - tokens.mean() for row in tokens.split(lengths.tolist())]
    variance = torch.cat(rows).square().mean()
    found = {}
    for lag in (lag for lag in LAGS if lag < lengths.max()):
        products = torch.cat([row[lag:] * row[:-lag] for row in rows if len(row) > lag])
        found[str(lag)] = (products.mean() / variance).item()
    return found


def write_prompts(path: Path, forms: Sequence[str] = FORMS) -> None:
    """Every form of question for every topic."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": form.format(topic), "answer": topic} for topic in TOPICS for form in forms]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def report(recorded: Recorded) -> dict[str, Any]:
    """All figures."""
    lengths = recorded.lengths
    edges = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0], dtype=torch.float64)
    return {
        "command": "VLLM_BIN=.venv-vllm/bin/vllm python benchmarks/long_responses.py",
        "machine": {"cpu": cpu(), "torch": torch.__version__},
        "run": tomllib.loads(CONFIG.read_text(encoding="utf-8")),
        "responses": len(lengths),
        "prompts": len(recorded.prompts.unique()),
        "tokens": int(lengths.sum()),
        "outside": OUTSIDE,
        "lengths": lengths.double().quantile(edges).int().tolist(),
        "differences": {
            name: figures(values, lengths, recorded.prompts) for name, values in recorded.tokens.items()
        },
    }


def main() -> None:
    """Record what is not there yet; write the figures."""
    parser = options_of(__doc__)
    parser.add_argument("--short", action="store_true", help="check the machinery; nothing is kept")
    short = parser.parse_args().short
    os.chdir(ROOT)
    sys.path.append(str(Path(__file__).parent))  # for the reward
    if short:
        with tempfile.TemporaryDirectory() as folder:
            found = report(record(load_config([CONFIG], [*SHORT, "--run.folder", folder])))
        print(json.dumps(found))
        return
    path = ROOT / "runs/evidence/long_responses/tokens.npz"
    if not path.exists():
        write_prompts(ROOT / "runs/evidence/long_prompts.jsonl")
        record_with_server().save(path)
    out = ROOT / "benchmarks/results/long_responses.json"
    out.write_text(as_json(report(load(path))), encoding="utf-8")
    print(out)


if __name__ == "__main__":
    main()
