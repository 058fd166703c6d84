"""For tests that change a file of a checkpoint and mean it."""

from __future__ import annotations

from pathlib import Path

from megatron_fspo.weights.folder import digest, read_sums, write_sums


def sum_again(checkpoint: Path) -> None:
    """Make its ``SHA256SUMS`` that of its files as they are."""
    write_sums(checkpoint, {name: digest(checkpoint / name) for name in read_sums(checkpoint)})
