"""The checkpoints in a run folder, and which one to resume; beside them are ``hf/``, ``report/`` and logs."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatron_fspo.errors import InputError
from megatron_fspo.job.lock import LOCK, Owner, check_not_held

if TYPE_CHECKING:
    from megatron_fspo.config import Config

Resume = Literal["no", "newest", "auto"]
"""The values of ``--resume``: start a new run; continue from the newest checkpoint; or continue from the
newest intact checkpoint if the run exists, otherwise start it."""

_CHECKPOINT = re.compile(r"step_(\d+)")


def checkpoint_folder(config: Config, step: int) -> Path:
    """Return the path of the checkpoint written after ``step`` steps."""
    return config.run_folder / "checkpoints" / f"step_{step:06d}"


def checkpoints(run: Config | Path) -> list[Path]:
    """Return the complete checkpoints of a run, or of a run folder, oldest first. (Incomplete ones have other
    names.)"""
    paths = ((run if isinstance(run, Path) else run.run_folder) / "checkpoints").glob("step_*")
    return sorted((path for path in paths if _CHECKPOINT.fullmatch(path.name)), key=_get_step)


def newest_checkpoint(config: Config, *, step: int) -> Path | None:
    """Return the newest checkpoint written after at most ``step`` steps."""
    return max((path for path in checkpoints(config) if _get_step(path) <= step), key=_get_step, default=None)


def remove_old_checkpoints(config: Config, *, good_step: int) -> dict[Path, str]:
    """Remove all checkpoints but the newest ``checkpoint.keep``, the milestones and the newest of at most
    ``good_step`` steps; return path → error of those that could not be removed. Also removes what a killed
    run left half written or half removed, so do not call this while a checkpoint is being written."""
    half = (config.run_folder / "checkpoints").glob("*.partial")
    good = newest_checkpoint(config, step=good_step)
    every = config.checkpoint.milestones
    old = [
        path
        for path in checkpoints(config)[: -config.checkpoint.keep]
        if path != good and (not every or _get_step(path) % every)
    ]
    stays = {}
    for path in [*half, *old]:
        partial = path.with_suffix(".partial")
        try:
            if path.is_symlink():
                raise OSError("it is a symbolic link")
            # Renamed first: whatever has the name of a checkpoint must be complete.
            shutil.rmtree(path.rename(partial))
        except OSError as error:
            stays[path if os.path.lexists(path) else partial] = str(error)
    return stays


def _get_step(path: Path) -> int:
    match = _CHECKPOINT.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def checkpoints_to_resume(config: Config, resume: Resume, *, mine: Owner | None = None) -> list[Path]:
    """Return the checkpoints from which the run may continue, oldest first; none for a new run.

    ``mine`` is the owner of the lock that this process holds, if any.

    Raises:
        InputError: the folder holds a run although ``resume`` is "no"; there is no run to resume; or another
            process of this machine holds the folder's lock.
    """
    folder = config.run_folder
    check_not_held(folder, mine)
    if resume == "no":
        try:
            there = any(not path.name.startswith(LOCK) for path in folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise InputError(f"run.folder: {folder} cannot be read: {error.strerror}") from None
        if there:
            raise InputError(
                f"{folder} holds a run already: continue it with --resume, change run.name, or remove it"
            )
        return []
    if resume == "newest" and not folder.exists():
        raise InputError(f"--resume: there is no run in {folder}")
    # A run killed before its first checkpoint starts over: the same seed gives the same numbers.
    return checkpoints(config)


def check_writable(folder: Path, *, key: str = "run.folder", probe: bool = False) -> None:
    """Raise ``InputError`` if a folder cannot be created or written; ``key`` is its config key, for messages.

    With ``probe``, write a temporary file to check. Ranks must not do this: others may be reading the folder.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not there.is_dir():
        raise InputError(f"{key}: {folder} cannot be created: {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"{key}: {folder} cannot be written: {there} is read-only for this user")
    if not probe:
        return
    try:
        with tempfile.TemporaryFile(dir=there, buffering=0) as file:
            file.write(b"\0")
    except OSError as error:
        raise InputError(
            f"{key}: {folder} cannot be written: creating a file in {there} failed: {error.strerror}"
        ) from None


def put_aside(damaged: Path) -> Path:
    """Rename an unreadable checkpoint, so that its name is free for a new one, and return its new path."""
    aside = damaged.with_suffix(".damaged")
    if aside.exists():
        shutil.rmtree(aside)
    return damaged.rename(aside)
