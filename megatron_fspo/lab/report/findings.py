"""What a report knows of a run: its settings, its metrics, and the sequences that it kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_fspo.config import Config
from megatron_fspo.config.loading import load_config
from megatron_fspo.lab.report.change import Change, accuracy_change, first_and_last_samples
from megatron_fspo.lab.report.history import History, Records, pooled_lre, read_records
from megatron_fspo.objective import ClipBand, LengthReweightingError
from megatron_fspo.objective.exponent import Exponent, measure_exponent
from megatron_fspo.record.log import JOBS, WARNINGS, read_rows

WINDOW = 5
"""Steps behind each number of the table."""
TAIL = 0.25
"""Share of the steps, the last ones, in the picture of clip rates by length."""
_POOL = 40_000
"""Records behind the pooled LRE, at most: its 400 resamples take a second then."""
_BLOCKS = 12
"""Stretches of steps behind the interval of the exponent, at most: 0.2 s each with the largest pool."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What the page is made of."""

    config: Config
    history: History
    records: Records
    pool: Records
    """An even sample of ``records``; all of them where they are not too many."""
    lre: LengthReweightingError
    """Of out-of-band acceptance, over ``pool``."""
    exponent: Exponent | str
    """Of S in ``pool``; where it cannot be measured, why."""
    change: Change | None
    """Of held-out accuracy."""
    jobs: list[dict[str, Any]]
    """What each job of the run computed on; empty for a run of an earlier version."""
    warnings: list[dict[str, Any]]
    """The last one of each title."""
    samples: list[dict[str, Any]]
    """Responses that its first and its last evaluation kept."""

    @property
    def token_level(self) -> bool:
        """Clip rates are shares of tokens then, and there is no band on S."""
        return self.config.loss.band() is None

    @property
    def steps(self) -> list[int]:
        """The training steps made."""
        steps: list[int] = self.history.series("critic/rewards/mean").steps.tolist()
        return steps

    def band(self) -> ClipBand | None:
        """The band at the end of the run, if there is one on S."""
        return band_at_end(self.config, self.history)


def read_findings(folder: Path) -> Findings:
    """Of a run, from its folder.

    Raises:
        InputError: the folder holds no run, or one without any step.
    """
    history = History(folder)
    config = load_config(folder / "config.toml")
    records = read_records(folder)
    pool = records.thinned(_POOL)
    samples = first_and_last_samples(folder, history)
    return Findings(
        config=config,
        history=history,
        records=records,
        pool=pool,
        lre=pooled_lre(pool),
        exponent=exponent_of(pool),
        change=accuracy_change(history, samples),
        jobs=list(read_rows(folder / JOBS)),
        warnings=list({row["title"]: row for row in read_rows(folder / WARNINGS)}.values()),
        samples=samples,
    )


def exponent_of(records: Records) -> Exponent | str:
    """The exponent of S over the steps of these records; where it cannot be measured, why.

    Its interval leaves out one stretch of steps after the other: neighbouring steps are no strangers to each
    other, and one by one thousands of them would take minutes.
    """
    steps, number = np.unique(records.step, return_inverse=True)
    blocks = number * min(_BLOCKS, len(steps)) // max(len(steps), 1)
    try:
        return measure_exponent(
            torch.from_numpy(records.log_ratio_sum),
            torch.from_numpy(records.length),
            torch.from_numpy(blocks),
        )
    except ValueError as error:
        return str(error)


def band_at_end(config: Config, history: History) -> ClipBand | None:
    """The band at the end of a run, if there is one on S."""
    loss = config.loss.reported(lambda name: history.series(name).last(1))
    return None if loss is None else loss.band()
