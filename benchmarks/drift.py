"""What does the drift of FSPO's band change where responses are long? drift = auto against none.

    python benchmarks/drift.py                      # all runs
    python benchmarks/drift.py --seeds 1 2 3        # these only: a run that is there is not made again

The task and the tables of benchmarks/density.py, all tokens uncertain. A rollout has prompts of 64, 512 and
4,096 tokens, 8 responses each, and gets 8 Adam steps, the first on-policy. *Fresh*: 16 prompts of each
length, and a step on two of each at a time, so no response has been trained on when its S is measured.
*Twice*: 16, in four mini-batches and two epochs. *Reused*: 8, all in every step. Advantages are
group-normalised. In the first two rollouts the learning rate warms up. The loss is ``FSPOLoss`` as shipped,
its band from ``FSPOState``: c calibrated after the warm-up and kept, dual clip at 2c. Arms: ``drift`` = auto
and none; *always* takes σ̂ from later epochs, too, as auto did before (in *reused*, auto is none).
Claims: benchmarks/evidence/claims_drift.toml.

Figures of the last eight rollouts, off-policy steps, but for accuracy, which is that at the end, computed:

* below, above: share of the longest responses with S out of the band; tilt: their difference, lopsided: its
  absolute value
* positive, negative: share clipped of the longest responses with A > 0, A < 0; uneven: by how much they
  differ from those of the shortest, mean of both
* clipped: share clipped of all responses with an advantage
* kl: KL(old‖new) of a longest response after the last step of a rollout, nats; exact over the symbols that
  are drawn next; log_kl: its logarithm
* mean, spread: of S of the longest, in nats; spread is σ̂ around its drift times √L; ess: as in density.py
"""

from __future__ import annotations

import json
import math
from itertools import product
from time import process_time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from density import BLOCK, SAMPLES, SYMBOLS, Policy, places
from machine import ROOT, machine, options_of
from megatron_fspo.losses import FSPOLoss
from megatron_fspo.objective import effective_sample_size, group_normalized_advantages, sequence_surrogate
from megatron_fspo.objective.calibration import centred_sigma

LENGTHS, UPDATES, WARM, ROLLOUTS, LATE = (64, 512, 4096), 8, 2, 16, 8
SEEDS, TEMPERS = range(21, 41), (0.0, 0.5)
ARMS = {"fresh": ("auto", "none"), "twice": ("auto", "none"), "reused": ("always", "none")}
PROMPTS, PARTS = {"fresh": 16, "twice": 16, "reused": 8}, {"fresh": 8, "twice": 4, "reused": 1}
"""Prompts of each length; mini-batches."""
RATES = {"fresh": 0.03, "twice": 0.03, "reused": 0.01}
FIGURES = ("below", "above", "positive", "negative", "positive_short", "negative_short")
FIGURES += ("clipped", "mean", "spread", "ess")
FOLDER, RESULT = ROOT / "runs/drift", ROOT / "benchmarks/results/evidence_drift.json"


@torch.no_grad()
def sample(policy: Policy, length: int, prompts: int, random: np.random.Generator) -> tuple[Tensor, Tensor]:
    """As ``Policy.sample`` of all tokens, faster: a uniform number each, looked up in the sums of chances."""
    chances = policy.log_probs(length // BLOCK).exp().double().numpy()
    sums = chances.cumsum(-1) / chances.sum(-1, keepdims=True) + np.arange(SYMBOLS)[:, None]
    flat, uniform = sums.reshape(len(sums), -1), random.random((length, prompts * SAMPLES))
    before = random.integers(SYMBOLS, size=prompts).repeat(SAMPLES)
    entries = np.empty(uniform.shape, dtype=np.int64)
    for place in range(length):
        entries[place] = flat[place // BLOCK].searchsorted(before + uniform[place], side="right")
        before = entries[place] % SYMBOLS
    entries += np.arange(length)[:, None] // BLOCK * SYMBOLS**2
    right = policy.rules.numpy().ravel()[entries // SYMBOLS] == entries % SYMBOLS
    counts = torch.zeros(prompts * SAMPLES, chances.size)
    counts.scatter_add_(1, torch.from_numpy(entries.T.copy()), torch.ones(entries.T.shape))
    return counts, torch.from_numpy(right.mean(0)).float()


def kl_of(old: Tensor, new: Tensor, counts: Tensor) -> float:
    """KL(old‖new) of a response, from log-probs [blocks, before, symbol], where counts [N, entries] were."""
    seen = counts.view(len(counts), *old.shape).sum(3).mean(0)
    return float((seen * (old.exp() * (old - new)).sum(-1)).sum())


def figures_of(total: Tensor, lengths: Tensor, advantages: Tensor, found: Any, band: Any) -> list[float]:
    """:data:`FIGURES` of an off-policy step; NaN of no response."""
    longest, shortest = lengths == LENGTHS[-1], lengths == LENGTHS[0]
    low, high = band.bounds(lengths)
    clipped, signs = found.clipped_low | found.clipped_high, (advantages > 0, advantages < 0)
    of_signs = [
        clipped[where & sign].float().mean().item() for where in (longest, shortest) for sign in signs
    ]
    return [
        (total < low)[longest].float().mean().item(),
        (total > high)[longest].float().mean().item(),
        *of_signs,
        clipped[advantages != 0].float().mean().item(),
        total[longest].mean().item(),
        centred_sigma(total, lengths) * math.sqrt(LENGTHS[-1]),
        effective_sample_size(found.ratio[longest]),
    ]


def train(
    data: str, temper: float, arm: str, seed: int, lr: float | None = None
) -> tuple[dict[str, Any], list[Any]]:
    """Figures of a run, and S [steps, N], A [steps, N], c and drift [steps] by rollout. Both arms of a seed
    have the same task, first weights, and random numbers."""
    generator, each = torch.Generator().manual_seed(seed), PROMPTS[data] * SAMPLES
    policy, state = (
        Policy(generator, LENGTHS[-1]),
        FSPOLoss(temper=temper, drift="none" if arm == "none" else "auto").start(
            longest=LENGTHS[-1], updates=UPDATES - 1, rollouts=ROLLOUTS - WARM
        ),
    )
    lr, random = lr or RATES[data], np.random.default_rng(seed)
    optimizer, curves, kl, records = torch.optim.Adam(policy.parameters, lr=lr), [], [], []
    for rollout in range(ROLLOUTS):
        sampled = [sample(policy, length, PROMPTS[data], random) for length in LENGTHS]
        scaled = [group_normalized_advantages(reward.view(-1, SAMPLES)).flatten() for _, reward in sampled]
        old, steps, kept = policy.log_probs().detach(), [], []
        for update in range(UPDATES):
            epoch, number = divmod(update, PARTS[data])
            part = slice(number * each // PARTS[data], (number + 1) * each // PARTS[data])
            gap = (policy.log_probs() - old).flatten()
            total = torch.cat([counts[part] @ gap[: counts.shape[1]] for counts, _ in sampled])
            advantages = torch.cat([one[part] for one in scaled])
            lengths = torch.tensor(LENGTHS).repeat_interleave(len(total) // len(LENGTHS))
            objective = state.objective(on_policy=not update, update=update + 1)
            band, now = objective.band, total.detach()
            found = sequence_surrogate(now, lengths, advantages, band, objective.dual_clip, temper)
            done = (rollout * UPDATES + update + 1) / (WARM * UPDATES)
            optimizer.param_groups[0]["lr"] = lr * min(1.0, done)
            optimizer.zero_grad()
            (-(found.weight * total).sum() / len(total)).backward()
            if torch.nn.utils.clip_grad_norm_(policy.parameters, 5.0).isfinite():  # else the step is skipped
                optimizer.step()
            if update:
                steps.append(figures_of(now, lengths, advantages, found, band))
                kept.append((now.numpy(), advantages.numpy(), band.c_high, band.drift))
                fresh = not epoch or arm == "always"
                state.observe(now, lengths, update=update + 1, warm=rollout >= WARM, fresh=fresh)
        kl.append(kl_of(old, policy.log_probs().detach(), sampled[-1][0]))
        curves.append(steps)
        records.append([np.array(column) for column in zip(*kept, strict=True)])
    late = np.nanmean(np.concatenate(curves[-LATE:]), 0).tolist()
    figures = dict(zip(FIGURES, late, strict=True)) | {"kl": float(np.mean(kl[-LATE:]))}
    figures["tilt"] = figures["below"] - figures["above"]
    figures |= {"lopsided": abs(figures["tilt"]), "log_kl": math.log(figures["kl"])}
    apart = [abs(figures[sign] - figures[f"{sign}_short"]) for sign in ("positive", "negative")]
    figures |= {"uneven": sum(apart) / 2, "c": float(records[-1][2][-1])}
    figures["drift"] = float(np.mean([one[3] for one in records[-LATE:]]))
    for kind, length in (("long", LENGTHS[-1]), ("short", LENGTHS[0])):
        figures[f"accuracy/{kind}"] = policy.accuracy(places("dense", length))
    rounded = {name: float(f"{value:.6g}") for name, value in figures.items()}
    return {"arm": name_of(data, temper, arm), "seed": seed} | rounded, records


def name_of(data: str, temper: float, arm: str) -> str:
    """``fresh/auto``, ``reused-tempered/none``."""
    return f"{data}{'-tempered' if temper else ''}/{arm}"


def main() -> None:
    """Make the runs that are not there; with all of them, write the figures."""
    parser = options_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--pilot", nargs=2, metavar=("DATA", "RATE"), help="print, and keep nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / "runs.jsonl"
    read = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    there = {(run["arm"], run["seed"]) for run in read}
    for seed, data, temper, arm in (
        (s, d, t, a) for s, d, t in product(args.seeds, PROMPTS, TEMPERS) for a in ARMS[d]
    ):
        if args.pilot:
            if data != args.pilot[0]:
                continue
            run, _ = train(data, temper, arm, seed, float(args.pilot[1]))
            print(args.pilot[1], json.dumps(run), f"{process_time():.0f} s", flush=True)
        elif (name_of(data, temper, arm), seed) not in there:
            run, records = train(data, temper, arm, seed)
            if seed == SEEDS[0]:  # for recompute.py: the last rollouts
                columns = zip(
                    ("sums", "advantages", "c", "drift"), zip(*records[-LATE:], strict=True), strict=True
                )
                np.savez(FOLDER / f"{run['arm'].replace('/', '.')}.npz", **dict(columns))
            with path.open("a") as file:
                file.write(json.dumps(run) + "\n")
    runs = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    runs = sorted((run for run in runs if run["seed"] in SEEDS), key=lambda run: (run["arm"], run["seed"]))
    if len(runs) == len(SEEDS) * len(TEMPERS) * sum(map(len, ARMS.values())):
        result = {"command": "python benchmarks/drift.py", "machine": machine(), "runs": runs}
        RESULT.write_text(json.dumps(result).replace('{"arm"', '\n{"arm"') + "\n", encoding="utf-8")
        files = {path.stem: np.load(path) for path in sorted(FOLDER.glob("*.npz"))}
        columns = {f"{name}/{key}": file[key] for name, file in files.items() for key in file.files}
        np.savez_compressed(RESULT.with_suffix(".npz"), **columns)
        print(RESULT)


if __name__ == "__main__":
    main()
