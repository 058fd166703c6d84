"""How often 95% intervals hold a truth that is known, and how often verdicts are wrong.

    python benchmarks/interval_coverage.py        # results/interval_coverage.json; ten minutes on one core

*Accuracy.* Populations of problems are known: a problem's chance is drawn from a Beta distribution, its
responses from that chance. Compared are the plain percentile bootstrap over problems, the interval that is
used, and the normal interval that takes all responses to be independent; paired is the used one, of the gain
of a second evaluation in which a problem was learned by a share that is drawn from Beta(0.3, 2).

*LRE.* Responses of 20 to 630 tokens are accepted with a chance that falls by a slope over log L, at 80% on
average; the truth is the LRE of 400,000 of them. Independent; eight to a prompt, whose chance has a spread of
its own; each four times, as in four optimizer steps; and few.

*Parts of S* (`explain`, with tokens): noise and signal of responses to prompts that share the signal, with
normal and with heavy-tailed (t, 3 degrees) noise.

*Verdicts* (claims.py): six claims of ten seeds where no arm differs, and where each is off by its margin.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import torch

from claims import Claim, compare, judge
from machine import ROOT, options_of
from megatron_fspo.evaluation.intervals import interval_of_means
from megatron_fspo.lab.explain.decomposition import take_apart
from megatron_fspo.objective import length_reweighting_error

POPULATIONS = [(9, (2.0, 1.0)), (30, (2.0, 2.0)), (30, (0.3, 2.0)), (30, (0.1, 1.0)), (100, (0.3, 3.0))]
SAMPLES = 16
GAIN = (0.3, 2.0)
CLEAR = ("supported beyond the margin", "supported within the margin", "opposite", "different", "dead")
"""Verdicts that say that arms differ; of a difference that is claimed, "supported" does, too."""


def coverage(problems: int, shape: tuple[float, float], trials: int, resamples: int) -> dict[str, float]:
    """By interval, the share of trials in which it held the mean of the population."""
    random = np.random.default_rng(problems)
    truth = shape[0] / sum(shape)
    held = dict.fromkeys(("by response", "percentile", "ours", "paired"), 0)
    for trial in range(trials):
        chances = random.beta(*shape, size=problems)
        values = random.binomial(SAMPLES, chances) / SAMPLES
        mean = values.mean()
        half = 1.96 * math.sqrt(mean * (1 - mean) / (problems * SAMPLES))
        held["by response"] += abs(mean - truth) <= half
        drawn = values[random.integers(problems, size=(resamples, problems))].mean(1)
        low, high = np.quantile(drawn, (0.025, 0.975))
        held["percentile"] += low <= truth <= high
        (ours,) = interval_of_means({"s": values[:, None]}, seed=trial, resamples=resamples)
        held["ours"] += ours.low <= truth <= ours.high
        learned = chances + (1 - chances) * random.beta(*GAIN, size=problems)
        gained = random.binomial(SAMPLES, learned) / SAMPLES - values
        (ours,) = interval_of_means({"s": gained[:, None]}, seed=trial, resamples=resamples)
        held["paired"] += ours.low <= (1 - truth) * GAIN[0] / sum(GAIN) <= ours.high
    return {name: float(count) / trials for name, count in held.items()}


def of_lre(slope: float, prompts: int, each: int, times: int, trials: int, seed: int) -> dict[str, float]:
    """Share of trials whose intervals hold the true LRE: ``prompts`` with so many responses ``each``, which
    are judged ``times`` times."""
    generator = torch.Generator().manual_seed(seed)

    def draw(number: int) -> tuple[torch.Tensor, ...]:
        place = torch.rand(number, generator=generator)[:, None]
        place = place + 0.5 * torch.rand(number, each, generator=generator)
        own = (0.15 if each > 1 else 0.0) * torch.randn(number, generator=generator)[:, None]
        chance = (0.8 - slope * (place / 1.5 - 0.5) + own).clamp(0.02, 0.98)
        accepted = torch.rand(number, each, generator=generator) < chance
        lengths = (20 * 10**place).long()
        clusters = torch.arange(number).repeat_interleave(each)
        return accepted.flatten(), lengths.flatten(), clusters

    accepted, lengths, _ = draw(400_000 // each)
    truth = length_reweighting_error(accepted, lengths, draws=0)
    held = dict.fromkeys(("mean", "max"), 0)
    for _ in range(trials):
        accepted, lengths, clusters = (column.repeat(times) for column in draw(prompts))
        found = length_reweighting_error(accepted, lengths, clusters=clusters)
        for name in held:
            low, high = getattr(found, f"{name}_interval")
            held[name] += low <= getattr(truth, name) <= high
    return {"truth": truth.mean} | {name: count / trials for name, count in held.items()}


def of_parts(heavy: bool, trials: int) -> dict[str, float]:
    """Share of trials whose intervals hold noise and signal, of 400 responses to 100 prompts."""
    random, noise, signal = np.random.default_rng(int(heavy)), 0.02, 0.003
    held = dict.fromkeys(("noise", "signal"), 0)
    for _ in range(trials):
        lengths = random.integers(20, 400, size=400)
        prompts = np.arange(400) // 4
        scale = noise / 3**0.5 if heavy else noise
        tokens = scale * (random.standard_t(3, lengths.sum()) if heavy else random.normal(size=lengths.sum()))
        tokens += np.repeat(signal * random.normal(size=100)[prompts], lengths)
        parts = take_apart(*(torch.from_numpy(x) for x in (tokens, lengths, prompts)))
        assert parts is not None
        held["noise"] += parts.noise.low <= noise <= parts.noise.high
        held["signal"] += parts.signal.low <= signal <= parts.signal.high
    return {name: count / trials for name, count in held.items()}


def of_verdicts(trials: int) -> dict[str, float]:
    """Shares of trials in which some verdict of a family is wrong."""
    random, margin, spread = np.random.default_rng(0), 0.02, 0.015
    family = [
        Claim(part="", text="", figure="", arm="", less="", test="equal" if n % 2 else "above", margin=margin)
        for n in range(6)
    ]
    wrong = {"a difference is claimed where none is": 0, "none is claimed where it is the margin": 0}
    equal = 0
    for _ in range(trials):
        gaps = random.normal(size=(6, 10)) * spread
        verdicts = judge(family, [compare(row, margin) for row in gaps.tolist()])
        wrong["a difference is claimed where none is"] += any(
            verdict in CLEAR or (verdict == "supported" and claim.test != "equal")
            for claim, verdict in zip(family, verdicts, strict=True)
        )
        equal += verdicts[1] == "supported"
        far = judge(family, [compare(row, margin) for row in (gaps + margin).tolist()])
        wrong["none is claimed where it is the margin"] += any(
            verdict == "no difference" or (verdict == "supported" and claim.test == "equal")
            for claim, verdict in zip(family, far, strict=True)
        )
    shares = {name: count / trials for name, count in wrong.items()}
    return shares | {"equal arms are found equal": equal / trials}


def main() -> None:
    """Simulate, print, and write the results."""
    parser = options_of(__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"accuracy": {}, "lre": {}, "parts": {}}

    def note(kind: str, name: str, shares: dict[str, float]) -> None:
        found[kind][name] = shares
        print(f"{kind}, {name}: " + "  ".join(f"{k} {v:.3f}" for k, v in shares.items()), flush=True)

    for problems, shape in POPULATIONS:
        note(
            "accuracy", f"{problems} problems, Beta{shape}", coverage(problems, shape, 4 * args.trials, 1000)
        )
    samples = {
        "400 independent": (400, 1, 1),
        "200 prompts of 8": (200, 8, 1),
        "60 prompts of 8": (60, 8, 1),
        "400, each four times": (400, 1, 4),
        "100 independent": (100, 1, 1),
    }
    for number, (name, sizes) in enumerate(samples.items()):
        for slope in (0.0, 0.1, 0.3):
            note("lre", f"{name}, slope {slope:g}", of_lre(slope, *sizes, trials=args.trials, seed=number))
    for heavy in (False, True):
        note("parts", "heavy-tailed" if heavy else "normal", of_parts(heavy, 4 * args.trials))
    found["verdicts"] = of_verdicts(10 * args.trials)
    print(found["verdicts"])
    out = ROOT / "benchmarks/results/interval_coverage.json"
    out.write_text(json.dumps({"trials": args.trials, **found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
