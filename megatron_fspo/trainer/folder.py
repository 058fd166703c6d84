"""The folder of a run: ``config.toml``, ``metrics.jsonl``, ``checkpoints/``, ``hf/``, ``report/``."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from megatron_fspo.config import Config
from megatron_fspo.config.loading import load_config, save_config
from megatron_fspo.errors import InputError

_CHECKPOINT = re.compile(r"step_(\d+)(?:\+(\d+))?")


def checkpoint_folder(config: Config, step: int, updates: int = 0) -> Path:
    """Where the checkpoint lives that was written after so many steps, and so many optimizer steps of the
    next."""
    name = f"step_{step:06d}" + (f"+{updates:03d}" if updates else "")
    return config.run_folder / "checkpoints" / name


def checkpoints(config: Config) -> list[Path]:
    """Complete checkpoints, oldest first. (One still being written has another name.)"""
    found = {}
    for path in (config.run_folder / "checkpoints").glob("step_*"):
        if match := _CHECKPOINT.fullmatch(path.name):
            found[int(match[1]), int(match[2] or 0)] = path
    return [found[place] for place in sorted(found)]


def remove_old_checkpoints(config: Config) -> None:
    """Keep the newest ``checkpoint.keep``, and nothing that a killed run left half written or half removed.

    Not while a checkpoint is being written.
    """
    half = (config.run_folder / "checkpoints").glob("*.partial")
    for path in [*half, *checkpoints(config)[: -config.checkpoint.keep]]:
        # What has the name of a checkpoint is a whole one.
        shutil.rmtree(path.rename(path.with_suffix(".partial")))


def checkpoint_to_resume(config: Config, *, resume: bool) -> Path | None:
    """The newest checkpoint with ``--resume``; None for a new run.

    Raises:
        InputError: a run of this name is there already and was not asked for, or has nothing to resume.
    """
    folder = config.run_folder
    if not resume:
        if folder.exists() and any(folder.iterdir()):
            raise InputError(
                f"{folder} holds a run already: continue it with --resume, change run.name, or remove it"
            )
        return None
    if not folder.exists():
        raise InputError(f"--resume: there is no run in {folder}")
    found = checkpoints(config)
    # A run killed before its first checkpoint starts over: the same seed gives the same numbers.
    return found[-1] if found else None


def write_config(config: Config) -> list[str]:
    """Write ``config.toml``; returns what changed against the one there, as ``key: old -> new`` lines."""
    path = config.run_folder / "config.toml"
    changes = _changes(load_config(path), config) if path.exists() else []
    config.run_folder.mkdir(parents=True, exist_ok=True)
    save_config(config, path)
    return changes


def _changes(old: Config, new: Config) -> list[str]:
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    lines = []
    for section, keys in after.items():
        for key in sorted(keys.keys() | before[section].keys()):
            was, is_now = before[section].get(key), keys.get(key)
            if was != is_now:
                lines.append(f"{section}.{key}: {was} -> {is_now}")
    return lines
