"""On two ranks that share a model: corrections of a mismatch that is not the same to the last bit on both.

correction_worker.py OUT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fspo.config import Parallel
from megatron_fspo.config.correction import LengthFairGate, SequenceMask, SequenceTIS
from megatron_fspo.mcore.machine.backend import choose_backend
from megatron_fspo.mcore.machine.startup import start, stop
from megatron_fspo.trainer.correction import correct
from megatron_fspo.trainer.mismatch import Mismatch
from mismatch_cases import LENGTHS, PACKS, packed, responses

RULES = {
    "sequence_tis": SequenceTIS(cap=2.0),
    "sequence_mask": SequenceMask(low=0.5, high=2.0),
    "length_fair_gate": LengthFairGate(c=0.2),
}
"""Of these, the responses of the ranks lie on either side of a limit."""


def main(out: Path) -> None:
    groups = start(choose_backend("cpu"), parallel=Parallel(tensor=2), seed=1)
    samples, deltas = responses()
    lengths = torch.tensor(LENGTHS)
    found: dict[str, Any] = {}
    for name, rule in RULES.items():
        limit = torch.full((len(LENGTHS),), 2.0, dtype=torch.float64).log()
        if name == "length_fair_gate":
            limit = 0.2 * lengths.double().sqrt()
        sums = limit * (1 + 1e-12 * (1 - 2 * dist.get_rank()))
        micro_batches, metrics = correct(
            rule,
            packed(samples, deltas, PACKS[1]),
            Mismatch(sums=sums, lengths=lengths, metrics={}),
            groups=groups,
        )
        weights = [
            batch.rollout_weights.tolist() for batch in micro_batches if batch.rollout_weights is not None
        ]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (weights, {key: str(value) for key, value in metrics.items()}))
        found[name] = every
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found), encoding="utf-8")
    stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
