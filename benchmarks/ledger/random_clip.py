"""A run that clips as many responses as a run of the sweep did, but any, and not those whose S is far.

    python benchmarks/ledger/random_clip.py MODEL --config run.toml --config random-1.toml --resume auto

MODEL names the arm that clips; its run of the same seed is beside this one. All else is that of
`megatron-fspo train`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from megatron_fspo.config.loading import load_config
from megatron_fspo.lab.report.history import History, read_records, steady
from megatron_fspo.lab.report.page import write_report
from megatron_fspo.losses import FSPOLoss
from megatron_fspo.mcore.machine.startup import job
from megatron_fspo.objective import PolicyObjective
from megatron_fspo.objective.surrogate import LossInputs, LossTerms, per_token
from megatron_fspo.trainer.loop import train
from megatron_fspo.trainer.prepare import prepare


@dataclass(kw_only=True, eq=False)
class Thinned:
    """The weights of a loss, of which a share of the responses that an update has moved is left out."""

    weights: PolicyObjective
    share: float
    generator: torch.Generator

    def __call__(self, inputs: LossInputs) -> LossTerms:
        terms = self.weights(inputs)
        drawn = torch.rand(len(inputs.lengths), generator=self.generator) < self.share
        drawn &= (inputs.advantages != 0) & (terms.log_ratio_sum != 0) & ~terms.nonfinite
        low, high = (
            (drawn & side).to(terms.ratio) for side in (inputs.advantages < 0, inputs.advantages > 0)
        )
        weight: Tensor = torch.where(per_token(drawn, inputs), 0.0, terms.weight)
        ratio = torch.where(drawn, 0.0, terms.ratio)
        return replace(
            terms, weight=weight, ratio=ratio, clipped_low=low, clipped_high=high, out_of_band=drawn
        )


class RandomClip(FSPOLoss):
    """FSPO whose band is too wide to clip, thinned at random."""

    _thinned: Thinned

    def objective(self) -> Thinned:  # type: ignore[override]
        return self._thinned


def main() -> None:
    """Run."""
    model, *words = sys.argv[1:]
    files = [Path(word) for before, word in pairwise(words) if before == "--config"]
    config = load_config(files, [])
    folder = config.run_folder.parent / f"{model}-{config.run.seed}"
    records = steady(read_records(folder), History(folder))
    share = float(records.clipped[records.advantage != 0].mean())
    with job():
        inputs = prepare(config, world_size=1)
        loss = RandomClip.model_construct(**dict(config.loss))
        generator = torch.Generator().manual_seed(config.run.seed)
        loss._thinned = Thinned(weights=config.loss.objective(), share=share, generator=generator)
        inputs = replace(inputs, config=config.model_copy(update={"loss": loss}))
        train(inputs, resume="auto")
    write_report(config.run_folder)


if __name__ == "__main__":
    main()
