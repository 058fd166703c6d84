"""On one rank: in which order a save reaches the disk, and what a load makes of a file that cannot be read.

durable_worker.py FOUND MODEL
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from checkpoint_checks import build
from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.mcore.machine.startup import stop
from megatron_fspo.mcore.state.checkpoint import load_checkpoint, save_checkpoint
from megatron_fspo.mcore.state.hf_weights import load_hf
from megatron_fspo.weights import folder as sums


def events_of(policy: Any, folder: Path) -> list[tuple[str, str]]:
    """("sync" or "rename", path from the parent of the folder) of a save, in their order."""
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        events.append(("sync", os.path.relpath(path, folder.parent)))
        fsync(descriptor)

    def renamed(old: Any, new: Any, **kwargs: Any) -> None:
        events.append(("rename", os.path.relpath(new, folder.parent)))
        rename(old, new, **kwargs)

    with patch.object(os, "fsync", synced), patch.object(os, "rename", renamed):
        save_checkpoint(policy, folder, {"step": 2})
    return events


def refusal(policy: Any, folder: Path) -> list[str]:
    try:
        load_checkpoint(policy, folder)
    except (InputError, TrainingError) as error:
        return [type(error).__name__, str(error)]
    return []


def main() -> None:
    out, model = map(Path, sys.argv[1:])
    policy = build(model, "dp4", torch.float32)
    load_hf(policy, model)
    folder = out.parent / "checkpoints/one"
    found: dict[str, Any] = {"events": events_of(policy, folder)}
    found["files"] = [str(path.relative_to(folder)) for path in folder.rglob("*")]
    with patch.object(sums, "_PAUSES", (0.0, 0.0)):
        state = folder / "trainer.json"
        text = state.read_text()
        state.unlink()
        found["lost"] = refusal(policy, folder)
        state.symlink_to("/proc/self/mem")  # its first byte is EIO
        found["unreadable"] = refusal(policy, folder)
        state.unlink()
        state.write_text(text)
        found["whole"] = refusal(policy, folder)
    out.write_text(json.dumps(found))
    stop()


if __name__ == "__main__":
    main()
