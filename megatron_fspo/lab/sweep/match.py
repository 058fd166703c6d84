"""Limits of a loss that leave as large a share of another run's sequences outside."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from megatron_fspo.config import Config
from megatron_fspo.errors import InputError
from megatron_fspo.lab.explain.dump import Dump
from megatron_fspo.lab.explain.findings import factor_for
from megatron_fspo.lab.explain.losses import reach
from megatron_fspo.lab.report.history import History, Records


def steady(records: Records, history: History) -> Records:
    """Those after the step in which calibration moved the band; all where nothing moved."""
    widths = history.series("fspo/c_high")
    moved = np.flatnonzero(np.diff(widths.values)) + 1
    return records.select(records.step > widths.steps[moved[-1]]) if len(moved) else records


def matched_loss(config: Config, records: Records) -> dict[str, Any]:
    """The loss section of a configuration, its limits scaled until the share of ``records`` outside is the
    share that was outside in their own run. FSPO's then does not calibrate itself.

    Raises:
        InputError: the loss has no band on S.
    """
    loss = config.loss
    if loss.band() is None:
        raise InputError(f"loss.name = {loss.name} has no band on S that could be matched: leave `match` out")
    dump = Dump(
        path=config.run_folder,
        rows=torch.from_numpy(records.step),
        lengths=torch.from_numpy(records.length),
        log_ratio_sum=torch.from_numpy(records.log_ratio_sum),
        advantages=torch.from_numpy(records.advantage),
        rewards=None,
        log_ratio=None,
        sampler_gap=None,
        clusters=torch.arange(len(records)),
        clustered_by="row",
        empty=0,
        nonfinite=0,
    )
    rate = float(records.out_of_band.mean())
    factor = factor_for(reach(loss, dump), rate)
    if factor > loss.widest():
        raise InputError(f"loss.name = {loss.name}: no limits leave {rate:.1%} outside; S is beyond ±36 nats")
    return loss.scaled(factor).model_dump(mode="json", exclude_none=True)
