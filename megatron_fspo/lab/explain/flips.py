"""Flipped routes: their part of S, and of what a loss clips.

A token has flipped where a router, in some layer, would choose other experts in the update than the old pass
took. Its log-ratio then has a jump that no step of the optimizer explains. What goes with flips is not all
due to them: routers flip where the policy moved, too. What a flip does to later tokens is not in their sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_fspo.evaluation.intervals import Estimate, jackknife_interval
from megatron_fspo.lab.explain.decomposition import assign_blocks, growth
from megatron_fspo.lab.explain.dump import Dump
from megatron_fspo.lab.explain.losses import judge, known_for
from megatron_fspo.losses import PolicyLossConfig
from megatron_fspo.objective.calibration import Exponent
from megatron_fspo.objective.noise import variance_share


@dataclass(frozen=True, kw_only=True)
class FlipFigures:
    """Figures of some responses."""

    tokens: float
    """Share of the response tokens that flipped."""
    variance: Estimate
    """Share of the variance of S/√L that goes with them: ``variance_share`` of ``objective.noise``."""
    clipped: dict[str, tuple[float, float]]
    """Loss → share clipped of the responses with A ≠ 0, with the limits given, and the same with the flipped
    tokens' part left out of S; NaN where there are none."""


@dataclass(frozen=True, kw_only=True)
class Flips:
    """Figures of the flips in a dump."""

    all: FlipFigures
    by_length: tuple[FlipFigures, ...]
    exponent_without: Exponent | str
    """a in spread ∝ L^a of S without the flipped tokens' part; or why it cannot be measured."""


def measure_flips(dump: Dump, losses: Sequence[PolicyLossConfig], bins: Tensor) -> Flips:
    """Return the figures of a dump by bin of length [N]; of losses that decide by S, not by its tokens."""
    part, sums, lengths = dump.flipped_log_ratio_sum, dump.log_ratio_sum, dump.lengths
    without = replace(dump, log_ratio_sum=sums - part, log_ratio=None)
    clipped = {
        loss.name: torch.stack([judge(loss, version).clipped > 0 for version in (dump, without)])
        for loss in known_for(without, losses)
    }

    blocks = assign_blocks(dump.clusters)

    def figures(here: Tensor) -> FlipFigures:
        judged = here & (dump.advantages != 0)
        rates = {name: flags[:, judged].double().mean(1).tolist() for name, flags in clipped.items()}
        parts = [here & (blocks != number) for number in range(int(blocks.max()) + 1)]
        whole, *left = (variance_share(part[index], sums[index], lengths[index]) for index in (here, *parts))
        return FlipFigures(
            tokens=(dump.flipped[here].sum() / lengths[here].sum()).item(),
            variance=jackknife_interval(whole, left),
            clipped={name: (rate, rest) for name, (rate, rest) in rates.items()},
        )

    return Flips(
        all=figures(torch.ones_like(bins, dtype=torch.bool)),
        by_length=tuple(figures(bins == number) for number in range(int(bins.max()) + 1)),
        exponent_without=growth(without.log_ratio_sum, lengths, dump.clusters),
    )
