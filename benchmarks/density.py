"""When is √L right? Bands while responses grow, with a growing and with a fixed number of uncertain tokens.

    python benchmarks/density.py                      # all runs, half an hour on one core
    python benchmarks/density.py --seeds 1 2 3        # these only: a run that is there is not made again

Var(S) grows with the length L only if the number of uncertain tokens does. Responses grow from 16 to 1,024
tokens within a run; *dense*: all of their tokens are uncertain; *fixed*: 16 are, spread over the response,
and the others are certain (log-ratio 0). Claims: benchmarks/evidence/claims_density.toml.

Task: at an uncertain token, the right symbol is a permutation of the one before. Every 16 tokens have a
permutation and logits [before, symbol] of their own, to which one table is added that all share. Reward is
the share of right symbols among the uncertain ones. A rollout is 16 prompts (the first symbol) of 8 responses
of one length; advantages are group-normalised; 12 Adam steps on it, the first of them on-policy.

Two rollouts of 16 tokens warm Adam up, three measure c = 2σ̂ of their off-policy steps for each width by
itself, and then responses grow. Until c is known nothing is clipped. But for *bare*, the dual clip is the
library's default, at 2c. Arms:

* sqrt, constant, linear: the width is c·√L, c, c·L; narrow: c/4·√L
* measured: c·√L; after every later rollout, c moves towards 2σ̂ of the last three, by at most 1.1 times, and
  stays within half and twice the first c
* free: the same without limits, from the last rollout alone
* none: no band, the dual clip of √L; bare: neither

Accuracy is the expected share of right symbols at a length, computed and not sampled. *Clipped* is the share
of responses with an advantage that the band clips, dual clip aside, in the off-policy steps of a rollout;
*early*: in the first four with a band, *late*: in the last four.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from itertools import product
from time import process_time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from machine import ROOT, machine, options_of
from megatron_fspo.objective import (
    FSPOBand,
    LengthFairDualClip,
    effective_sample_size,
    group_normalized_advantages,
    sequence_surrogate,
)
from megatron_fspo.objective.calibration import sigma_hat

SYMBOLS, BLOCK, LONGEST, DECISIONS = 16, 16, 1024, 16
PROMPTS, SAMPLES, UPDATES = 16, 8, 12
WARM, MEASURED, GROWING, LONG = 2, 3, 16, 3
"""Rollouts: of Adam's warm-up, of σ̂, while responses grow, and at the longest."""
ROLLOUTS = WARM + MEASURED + GROWING + LONG
SEEDS, RATES, DENSITIES = range(1, 41), (0.03, 0.01), ("dense", "fixed")
EXPONENTS = {"constant": 0.0, "linear": 1.0}
"""Arm → exponent of its width, unless ½."""
SHARED = ("sqrt", "constant", "linear", "measured", "free", "none")
ARMS = {0.0: (*SHARED, "narrow", "bare"), 0.5: SHARED}
"""Temper → arms."""
LENGTHS = {"short": BLOCK, "long": LONGEST}
FIGURES = ("clipped", "dual_clipped", "ess", "sigma", "c")
FOLDER, RESULT = ROOT / "runs/density", ROOT / "benchmarks/results/evidence_density.json"


def length_at(rollout: int) -> int:
    """Tokens of a response: 64-fold, in steps of 16 tokens."""
    grown = min(max(rollout - WARM - MEASURED + 1, 0) / (GROWING + 1), 1.0)
    return round(2 ** (6 * grown)) * BLOCK


def places(density: str, length: int) -> Tensor:
    """The block of each uncertain token [k] of a response."""
    count = length if density == "dense" else DECISIONS
    return torch.arange(count) * (length // count) // BLOCK


class Policy:
    """Tables of logits, and the rules that are to be learned."""

    def __init__(self, generator: torch.Generator, longest: int = LONGEST) -> None:
        self.rules = torch.rand(longest // BLOCK, SYMBOLS, generator=generator).argsort(-1)
        known = 2.6 * torch.nn.functional.one_hot(self.rules, SYMBOLS).float()
        own = known + 0.5 * torch.randn(known.shape, generator=generator)
        self.parameters = [own.requires_grad_(), torch.zeros(SYMBOLS, SYMBOLS, requires_grad=True)]

    def log_probs(self, blocks: int | None = None) -> Tensor:
        """[blocks, before, symbol], of the first blocks."""
        own, shared = self.parameters
        return torch.log_softmax(own[:blocks] + shared, -1)

    @torch.no_grad()
    def sample(self, at: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """How often each response has drawn each entry of the tables [N, entries], and rewards [N]."""
        number, size = PROMPTS * SAMPLES, int(at.max()) + 1
        tables = self.log_probs(size)
        chance = -torch.empty(number, len(at), SYMBOLS).exponential_(generator=generator).log()
        before = torch.randint(SYMBOLS, (PROMPTS,), generator=generator).repeat_interleave(SAMPLES)
        steps = []
        for place, block in enumerate(at.tolist()):
            after = (tables[block][before] + chance[:, place]).argmax(-1)
            steps.append((block * SYMBOLS + before) * SYMBOLS + after)
            before = after
        entries = torch.stack(steps, 1)
        right = self.rules[:size].flatten()[entries // SYMBOLS] == entries % SYMBOLS
        counts = torch.zeros(number, tables.numel()).scatter_add_(1, entries, torch.ones(entries.shape))
        return counts, right.float().mean(1)

    @torch.no_grad()
    def accuracy(self, at: Tensor) -> float:
        """The expected share of right symbols."""
        tables = self.log_probs().exp().double()
        right = tables.gather(2, self.rules[..., None])[..., 0]
        spread, total = torch.full((SYMBOLS,), 1.0 / SYMBOLS, dtype=torch.float64), 0.0
        for block in at.tolist():
            total += float(spread @ right[block])
            spread = spread @ tables[block]
        return total / len(at)


@dataclass
class Width:
    """The band of an arm: S and L of the off-policy steps, by rollout, and what follows from them."""

    arm: str
    c: float = math.inf
    first: float = math.inf
    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def observe(self, sums: Tensor, lengths: Tensor) -> None:
        """Add a rollout, and set c for the next one."""
        self.seen.append((sums, lengths))
        if len(self.seen) < WARM + MEASURED:
            return
        start, free = math.isinf(self.c), self.arm == "free"
        last = self.seen[-1:] if free and not start else self.seen[-MEASURED:]
        now = 2 * sigma_hat(*map(torch.cat, zip(*last, strict=True)), EXPONENTS.get(self.arm, 0.5))
        if start:
            self.c = self.first = now / 4 if self.arm == "narrow" else now
        elif free:
            self.c = now
        elif self.arm == "measured":
            near = min(max(now, self.c / 1.1), self.c * 1.1)
            self.c = min(max(near, self.first / 2), self.first * 2)

    def limits(self) -> tuple[FSPOBand, LengthFairDualClip | None]:
        """Band and dual clip of this moment; a band of 1e9 is none."""
        exponent = EXPONENTS.get(self.arm, 0.5)
        c = 1e9 if self.arm in ("none", "bare") else min(self.c, 1e9)
        dual = None if self.arm == "bare" else LengthFairDualClip(c=min(2 * self.c, 1e9), exponent=exponent)
        return FSPOBand(c_low=c, c_high=c, exponent=exponent), dual


def train(density: str, temper: float, lr: float, arm: str, seed: int) -> tuple[dict[str, Any], list[Any]]:
    """Figures of a run, and S [steps, N], A [N] and c by rollout. All arms of a seed have the same task,
    first weights, and random numbers."""
    generator = torch.Generator().manual_seed(seed)
    policy, width = Policy(generator), Width(arm)
    optimizer = torch.optim.Adam(policy.parameters, lr=lr)
    curves, records = [], []
    for rollout in range(ROLLOUTS):
        counts, rewards = policy.sample(places(density, length_at(rollout)), generator)
        advantages = group_normalized_advantages(rewards.view(PROMPTS, SAMPLES)).flatten()
        lengths, judged = torch.full((len(rewards),), length_at(rollout)), advantages != 0
        blocks = counts.shape[1] // SYMBOLS**2
        old, sums, steps = policy.log_probs(blocks).detach().flatten(), [], []
        for update in range(UPDATES):
            total = counts @ (policy.log_probs(blocks).flatten() - old)
            found = sequence_surrogate(total, lengths, advantages, *width.limits(), temper=temper)
            if update:
                sums.append(total.detach())
                flags = torch.stack([found.clipped_low | found.clipped_high, found.dual_clipped])
                ess = effective_sample_size(found.ratio)  # NaN: all are clipped
                steps.append([*flags[:, judged].float().mean(1).tolist(), 0.0 if math.isnan(ess) else ess])
            done = (rollout * UPDATES + update + 1) / (WARM * UPDATES)
            optimizer.param_groups[0]["lr"] = lr * min(1.0, done)
            optimizer.zero_grad()
            (-(found.weight * total).sum() / len(total)).backward()
            if torch.nn.utils.clip_grad_norm_(policy.parameters, 5.0).isfinite():  # else the step is skipped
                optimizer.step()
        every = lengths.repeat(len(sums))
        curves.append([*np.mean(steps, 0).tolist(), sigma_hat(torch.cat(sums), every), width.c])
        records.append((torch.stack(sums).numpy(), advantages.numpy(), width.c))
        width.observe(torch.cat(sums), every)
    figures = {f"accuracy/{kind}": policy.accuracy(places(density, size)) for kind, size in LENGTHS.items()}
    for kind, part in (("early", curves[WARM + MEASURED :][:4]), ("late", curves[-4:])):
        means = np.mean(part, 0).tolist()
        figures |= {f"{name}_{kind}": value for name, value in zip(FIGURES, means, strict=True)}
    rounded = {name: float(f"{value:.6g}") for name, value in figures.items()}
    return {"arm": name_of(density, temper, lr, arm), "seed": seed} | rounded, records


def name_of(density: str, temper: float, lr: float, arm: str) -> str:
    """``dense-0.03/sqrt``, ``fixed-0.01-tempered/none``."""
    return f"{density}-{lr:g}{'-tempered' if temper else ''}/{arm}"


def main() -> None:
    """Make the runs that are not there; with all of them, write the figures."""
    parser = options_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / "runs.jsonl"
    runs = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    there = {(run["arm"], run["seed"]) for run in runs}
    for seed, density, temper, lr in product(args.seeds, DENSITIES, ARMS, RATES):
        for arm in ARMS[temper]:
            if ((name := name_of(density, temper, lr, arm)), seed) in there:
                continue
            run, records = train(density, temper, lr, arm, seed)
            if seed == SEEDS[0]:  # for recompute.py: the last rollouts
                columns = dict(zip(("sums", "advantages", "c"), zip(*records[-4:], strict=True), strict=True))
                np.savez(FOLDER / f"{name.replace('/', '.')}.npz", **columns)
            with path.open("a") as file:
                file.write(json.dumps(run) + "\n")
            runs.append(run)
        print(f"seed {seed}, {density}, {temper:g}, {lr:g}: {process_time():.0f} s", flush=True)
    runs = sorted((run for run in runs if run["seed"] in SEEDS), key=lambda run: (run["arm"], run["seed"]))
    if {run["seed"] for run in runs} == set(SEEDS):
        result = {"command": "python benchmarks/density.py", "machine": machine(), "runs": runs}
        RESULT.write_text(json.dumps(result).replace('{"arm"', '\n{"arm"') + "\n", encoding="utf-8")
        kept = {path.stem: np.load(path) for path in sorted(FOLDER.glob("*.npz"))}
        columns = {f"{name}/{key}": file[key] for name, file in kept.items() for key in file.files}
        np.savez_compressed(RESULT.with_suffix(".npz"), **columns)
        print(RESULT)


if __name__ == "__main__":
    main()
