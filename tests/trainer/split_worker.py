"""On two ranks: what one optimizer step reports, for every split of one batch in several layouts.

split_worker.py OUT.json
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_fspo.mcore.backend import choose_backend
from megatron_fspo.mcore.policy_loss import PolicyLoss
from megatron_fspo.mcore.startup import start, stop
from megatron_fspo.parallel.metrics import gather_lists, share
from megatron_fspo.trainer.losses import LossState
from megatron_fspo.trainer.records import SequenceRecord, clip_metrics, records_of
from megatron_fspo.verify import production
from megatron_fspo.verify.cases import (
    LOSSES,
    SMALL,
    SPLITS,
    TEMPERATURE,
    drifts,
    make_samples,
    random_weights,
)
from megatron_fspo.verify.layouts import parse_layout

LAYOUTS = ("dp2", "cp2", "pp2", "tp2.sp")


def reported(layout_name: str) -> dict[str, dict[str, float]]:
    """Loss and split → every number of the step."""
    backend = choose_backend("cpu")
    layout = parse_layout(layout_name, world_size=2)
    groups = start(backend, parallel=layout.parallel, seed=1)
    policy = production.build(layout, SMALL, random_weights(SMALL), backend, groups, torch.float32)
    samples = make_samples(SMALL)
    moved = drifts(samples, seed=5)
    found = {}
    for split in SPLITS:
        scored = production.score(policy, split, samples, TEMPERATURE)
        batches = [
            replace(batch, old_log_probs=production.log_probs_below(batch, log_probs, moved, samples))
            for batch, log_probs in zip(scored.micro_batches, scored.log_probs, strict=True)
        ]
        for name in ("fspo", "gspo", "grpo", "dapo"):
            mine: list[SequenceRecord] = []
            loss = PolicyLoss(
                objective=LossState(LOSSES[name]).objective(),
                scoring=scored.scoring,
                observer=lambda batch, terms, mine=mine: mine.extend(
                    records_of(batch, terms, groups.dp.rank())
                ),
            )
            update = policy.update(batches, loss)
            records = gather_lists(share(mine, group=groups.pp, source=-1), group=groups.dp)
            numbers = update.metrics | {"grad_norm": update.grad_norm} | clip_metrics(records, seed=1)
            found[f"{name} | {split}"] = numbers
    return found


def main() -> None:
    found = {}
    for layout in LAYOUTS:
        found[layout] = reported(layout)
        writer = dist.get_rank() == 0
        stop()
    if writer:
        Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
