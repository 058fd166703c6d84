"""Token log-probs of some responses of a run, one parquet file a step: what `explain` judges every loss by.

A row is a response in one off-policy optimizer step, with the fields of a dump (docs/explain.md).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fspo.packing.batch import MicroBatch

TOKENS = "tokens"
"""Folder of the files in that of a run."""


class Piece(NamedTuple):
    """The tokens of a response that one context-parallel rank holds, in one optimizer step."""

    update: int
    sample: int
    advantage: float
    positions: Tensor
    """[t] in the sequence."""
    log_ratio: Tensor
    """[t] fp32 log π_new − log π_old."""
    old_log_probs: Tensor
    """[t] fp32."""


def cut_pieces(update: int, batch: MicroBatch, log_ratio: Tensor, every: int) -> list[Piece]:
    """Return the pieces of a micro-batch whose sample's number ``every`` divides; waits for the device."""
    host = batch.on_host
    assert batch.old_log_probs is not None
    columns = (batch.loss_mask, batch.segment, batch.position_ids[0], log_ratio, batch.old_log_probs)
    mask, segment, positions, ratio, old = (column.detach().cpu() for column in columns)
    pieces = []
    chosen = zip(host.sample_index.tolist(), host.advantages.tolist(), strict=True)
    for number, (sample, advantage) in enumerate(chosen):
        if sample % every == 0:
            own = mask & (segment == number)
            parts = (column[own].float() for column in (ratio, old))
            pieces.append(Piece(update, sample, advantage, positions[own], *parts))
    return pieces


def write_tokens(folder: Path, step: int, samples: int, pieces: Sequence[Piece]) -> None:
    """Write the responses of a step, of which each prompt has so many; whole, or not at all."""
    import pyarrow  # takes a third of a second
    from pyarrow import parquet

    whole: dict[tuple[int, int], list[Piece]] = {}
    for piece in pieces:
        whole.setdefault((piece.update, piece.sample), []).append(piece)
    rows = []
    for (update, sample), parts in sorted(whole.items()):
        order = torch.cat([part.positions for part in parts]).argsort()
        ratio, old = (
            torch.cat([getattr(part, name) for part in parts])[order]
            for name in ("log_ratio", "old_log_probs")
        )
        rows.append(
            {
                "step": step,
                "update": update,
                "prompt": f"{step}/{sample // samples}",
                "response": f"{step}/{sample}",
                "advantage": parts[0].advantage,
                "length": len(ratio),
                "log_probs": (old + ratio).numpy(),
                "old_log_probs": old.numpy(),
            }
        )
    path = folder / TOKENS / f"step_{step:06d}.parquet"
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path.with_suffix(".part"), compression="zstd")
    os.replace(path.with_suffix(".part"), path)


def drop_later(folder: Path, step: int) -> None:
    """Remove what was written after a step."""
    for path in (folder / TOKENS).glob("step_*.parquet"):
        if int(path.stem.removeprefix("step_")) > step:
            path.unlink()
