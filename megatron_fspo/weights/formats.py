"""Open a checkpoint of either format."""

from __future__ import annotations

from pathlib import Path

from megatron_fspo.weights.architecture import Architecture
from megatron_fspo.weights.hf_reader import HFReader
from megatron_fspo.weights.megatron_reader import MegatronReader, data_folder
from megatron_fspo.weights.reader import Reader
from megatron_fspo.weights.safe_pickle import METADATA


def is_megatron(checkpoint_dir: Path) -> bool:
    """Whether the folder holds a Megatron distributed checkpoint."""
    return (data_folder(checkpoint_dir) / METADATA).is_file()


def open_checkpoint(checkpoint_dir: Path, arch: Architecture) -> Reader:
    """Reader of a Hugging Face folder, or of a Megatron one; ``arch`` is what its config.json says."""
    return MegatronReader(checkpoint_dir, arch) if is_megatron(checkpoint_dir) else HFReader(checkpoint_dir)
