"""NCCL's flight recorder: what each rank did last, written into a folder when a collective times out.

NCCL's watchdog then kills the ranks, so their launcher says where the folder is.
"""

from __future__ import annotations

import os
from pathlib import Path

NOTE = "MEGATRON_FSPO_DUMPS"
"""Variable with the file in which ranks tell their launcher where the dumps go."""


def record_collectives(folder: Path) -> None:
    """Turn the recorder on. Call it before process groups are made; the user's own settings stay. NCCL does
    not make the folder: :func:`make_folder` does, when the run folder is this job's."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    prefix = os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder.absolute() / "rank_"))
    if note := os.environ.get(NOTE):
        Path(note).write_text(prefix)


def make_folder() -> None:
    """Make the folder for dumps, if the recorder is on."""
    if prefix := os.environ.get("TORCH_FR_DUMP_TEMP_FILE"):
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)


def dumped(note: Path, since: float) -> str | None:
    """Return the line for the launcher's user if ranks have written dumps since this time."""
    prefix = Path(note.read_text() or "/nowhere")
    dumps = [path for path in prefix.parent.glob(f"{prefix.name}*") if path.stat().st_mtime >= since]
    if not dumps:
        return None
    told = f"`megatron-fspo status --hang {prefix.parent}` compares them"
    return f"a collective timed out; the last ones of {len(dumps)} ranks are in {prefix.parent}: {told}"
