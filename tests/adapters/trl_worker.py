"""One optimizer step of FSPOTrainer on every rank: rank 0's gradient goes to the file it is told."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
from trl_batches import make_trainer, random_batch

from megatron_fspo.adapters.trl import FSPOConfig, FSPOTrainer

RESPONSES = 8


def step(folder: Path, out: str) -> None:
    """Two micro-batches; of the 8 responses each rank has its share, in their order."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    share = RESPONSES // world
    trainer = make_trainer(FSPOTrainer, FSPOConfig, folder, micro_batches=2, n=share)
    batch = random_batch(RESPONSES)
    mine = {
        name: value if name == "num_items_in_batch" else value[rank * share : (rank + 1) * share]
        for name, value in batch.items()
    }
    trainer._generate_and_score_completions = lambda _: mine
    model = trainer.accelerator.prepare(trainer.model)
    for _ in range(2):
        trainer.training_step(model, None, None)
    if rank == 0:
        # The data-parallel wrapper gave every rank the mean over ranks.
        torch.save({name: p.grad for name, p in trainer.model.named_parameters()}, out)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        step(Path(name), sys.argv[1])
