"""How far does a clip turn the update? Cosine of the clipped to the unclipped one, and what it comes from.

    python benchmarks/cosine.py

make-sum's model takes three rollouts of FSPO, as `make demo` begins. At the end of the third, after all its
optimizer steps, the gradient of every response is computed alone, so any update can be put together from
them: Σ weight_i ∇S_i without those that a band clips; without as many at random; and on average, if each was
clipped as often as its length, its sign of A or both are. A guarantee that speaks of rates by length
(docs/algorithm.md) can be right about the second kind only: the first also depends on *which* responses of a
length are clipped. Bands clip the same share of the responses with A ≠ 0. Plain torch, float32, one thread.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from scipy import stats
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from machine import ROOT, machine, markdown, options_of
from megatron_fspo.objective import FSPOBand, length_reweighting_error
from megatron_fspo.objective.advantages import leave_one_out_advantages
from megatron_fspo.objective.fairness import length_bins
from megatron_fspo.objective.surrogate import sequence_surrogate
from megatron_fspo.rewards.make_sum import digits_sum_to

TASK = ROOT / "examples/make_sum"
PROMPTS, SAMPLES, LONGEST = 64, 8, 100
ROLLOUTS, MINI_BATCHES, EPOCHS = 3, 4, 2
LEARNING_RATE, WARMUP, CLIP_GRAD = 1e-4, 16, 1.0
C = 0.045
"""What trains; about what `loss.calibrate` gives there."""
BANDS = {"constant": 0.0, "√L": 0.5, "L": 1.0}
"""Exponent a of c·L^a."""
SHARES = (0.15, 0.3)
BINS, DRAWS = 8, 200


class Rollout:
    """Responses to a draw of prompts. N = PROMPTS · SAMPLES, T the longest sequence; right-padded."""

    def __init__(self, model: Any, tokenizer: Any, rows: list[Mapping[str, str]]) -> None:
        prompts = tokenizer([row["prompt"] for row in rows for _ in range(SAMPLES)], add_special_tokens=False)
        first = len(prompts.input_ids[0])
        assert all(len(ids) == first for ids in prompts.input_ids), "prompts of one length need no padding"
        tokens = torch.tensor(prompts.input_ids)
        with torch.no_grad():
            self.tokens = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=True,
                top_k=0,
                max_new_tokens=LONGEST,
            )
        responses = self.tokens[:, first:]
        stopped = responses == tokenizer.eos_token_id
        self.lengths = torch.where(stopped.any(1), stopped.int().argmax(1) + 1, responses.shape[1])
        self.mask = torch.arange(responses.shape[1]) < self.lengths[:, None]
        self.first = first
        texts = [
            tokenizer.decode(ids[:length], skip_special_tokens=True).replace(" ", "")
            for ids, length in zip(responses, self.lengths, strict=True)
        ]
        answers = [row["answer"] for row in rows for _ in range(SAMPLES)]
        rewards = [
            float(bool(stop) and digits_sum_to(*pair))
            for stop, *pair in zip(stopped.any(1), texts, answers, strict=True)
        ]
        self.rewards = torch.tensor(rewards)
        self.advantages = leave_one_out_advantages(self.rewards.view(PROMPTS, SAMPLES)).flatten()
        with torch.no_grad():
            self.old = self.log_probs(model, torch.arange(len(self.lengths)))

    def log_probs(self, model: Any, at: Tensor) -> Tensor:
        """log π of the whole responses with these numbers [n]."""
        end = self.first + int(self.lengths[at].max())
        tokens = self.tokens[at, :end]
        scores = model(tokens, use_cache=False).logits[:, self.first - 1 : -1].log_softmax(-1)
        chosen = scores.gather(-1, tokens[:, self.first :, None])[..., 0]
        return (chosen * self.mask[at, : chosen.shape[1]]).sum(1)

    def weights(self, log_ratio_sum: Tensor, at: Tensor, band: FSPOBand) -> Tensor:
        """dJ/dS of these responses [n]; 0 where the band clips."""
        return sequence_surrogate(
            log_ratio_sum.detach(), self.lengths[at].to(log_ratio_sum), self.advantages[at], band
        ).weight


def train(seed: int) -> tuple[Any, Rollout]:
    """The model at the end of its last rollout, and that rollout."""
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_pretrained(TASK / "checkpoint", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TASK / "checkpoint")
    rows = [json.loads(line) for line in (TASK / "train.jsonl").read_text().splitlines()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    band = FSPOBand(c_low=C, c_high=C)
    for _ in range(ROLLOUTS):
        drawn = [rows[number] for number in torch.randperm(len(rows))[:PROMPTS]]
        rollout = Rollout(model, tokenizer, drawn)
        for at in [*torch.arange(PROMPTS * SAMPLES).chunk(MINI_BATCHES)] * EPOCHS:
            new = rollout.log_probs(model, at)
            optimizer.zero_grad()
            (-(rollout.weights(new - rollout.old[at], at, band) * new).mean()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
            optimizer.step()
            schedule.step()
    return model, rollout


def products(model: Any, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """S of the responses with A ≠ 0 [n], and all inner products of their updates weight_i ∇S_i [n, n],
    unclipped; float64."""
    numbers = rollout.advantages.nonzero().flatten()
    wide = FSPOBand(c_low=1e3, c_high=1e3)
    sums, updates = [], []
    for at in numbers.split(1):
        new = rollout.log_probs(model, at)
        gradients = torch.autograd.grad(new.sum(), tuple(model.parameters()))
        sums.append(new.detach() - rollout.old[at])
        weight = rollout.weights(sums[-1], at, wide)
        updates.append(weight * torch.cat([one.flatten() for one in gradients]))
    rows = torch.stack(updates)
    return torch.cat(sums), (rows.double() @ rows.double().T)


def figures(seed: int) -> dict[str, Any]:
    """Of one seed: by share clipped and band the cosines, and what the guarantee by length says."""
    model, rollout = train(seed)
    sums, inner = products(model, rollout)
    here = rollout.advantages != 0
    positive, lengths = rollout.advantages[here] > 0, rollout.lengths[here]
    found: dict[str, Any] = {"reward": float(rollout.rewards.mean()), "responses": len(sums)}
    for share in SHARES:
        for name, exponent in BANDS.items():
            reach = torch.where(positive, sums, -sums) / lengths**exponent
            accepted = reach <= reach.quantile(1 - share)
            found[f"{share:g} {name}"] = cosines(inner, accepted, lengths, positive, seed=seed)
    return found


def cosines(
    inner: Tensor, accepted: Tensor, lengths: Tensor, positive: Tensor, *, seed: int
) -> dict[str, float]:
    """With the whole update, of updates that leave out some responses.

    Args:
        inner: inner products of the responses' updates [n, n].
        accepted: bool [n], by the clip.
        lengths: in tokens [n].
        positive: bool [n], A > 0.
        seed: of what is drawn at random.
    """
    bins, generator = length_bins(lengths, BINS), torch.Generator().manual_seed(seed)

    def cosine(weights: Tensor) -> float:
        kept = weights.double() @ inner
        return float(kept.sum() / ((kept @ weights.double()) * inner.sum()).sqrt())

    def by(strata: Tensor) -> float:
        """If every response were accepted as often as its stratum is."""
        rates = torch.bincount(strata, accepted.double()) / torch.bincount(strata).clamp(min=1)
        return cosine(rates[strata])

    members = torch.nn.functional.one_hot(bins).double()
    spread = (members.T @ inner @ members).diagonal().sqrt().sum() / inner.sum().sqrt()
    error = length_reweighting_error(accepted, lengths, BINS, interval=False)
    orders = (torch.randperm(len(accepted), generator=generator) for _ in range(DRAWS))
    return {
        "clipped": float((~accepted).double().mean()),
        "cosine": cosine(accepted),
        "random": mean(cosine(accepted[order]) for order in orders),
        "length": by(bins),
        "sign": by(positive.long()),
        "both": by(2 * bins + positive),
        "lre_max": error.max,
        "bound": max(0.0, 1 - float(spread * error.max) ** 2) ** 0.5,
    }


def table(result: Mapping[str, Any]) -> str:
    """Means over seeds ± the half width of their 95% t interval; "length" as if a response were clipped as
    often as its length is. The file has "sign" and "both", too."""
    names = ("cosine", "random", "length", "lre_max", "bound")
    runs, rows = result["runs"], []
    for key in (key for key in runs[0] if isinstance(runs[0][key], dict)):
        share, band = key.split()
        cells = [[run[key][name] for run in runs] for name in names]
        reach = stats.t.ppf(0.975, len(runs) - 1) / len(runs) ** 0.5
        rows.append(
            [f"{float(share):.0%}", band, *(f"{mean(c):.3f} ± {reach * stdev(c):.3f}" for c in cells)]
        )
    return markdown(["clipped", "band", *names], rows)


def main() -> None:
    """Print the table; write the figures."""
    parser = options_of(__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/cosine.json")
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error("--seeds: at least 2, or nothing has an interval")
    torch.set_num_threads(1)
    runs = []
    for seed in range(1, args.seeds + 1):
        runs.append(figures(seed))
        print(seed, runs[-1]["reward"], file=sys.stderr)
    result = {"command": "python benchmarks/cosine.py", "machine": machine(), "runs": runs}
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()
