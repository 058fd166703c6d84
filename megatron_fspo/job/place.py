"""A job takes its place: all ranks have the same run in hand, and its folder for themselves."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_fspo.config import Config
from megatron_fspo.job.folder import Resume, checkpoint_folder, checkpoints_to_resume
from megatron_fspo.job.lock import FolderLock
from megatron_fspo.job.same import prove_folder_is_shared, prove_same
from megatron_fspo.parallel.control import Control


@dataclass(frozen=True)
class Place:
    """The folder of the run, held by this job."""

    checkpoints: tuple[Path, ...]
    """That the run may go on from, oldest first, as the first rank found them."""
    lock: FolderLock | None
    """On the first rank."""
    job: str
    """The nonce of the lock."""

    def check(self) -> None:
        """Nothing, while the folder is this job's.

        Raises:
            TrainingError: another job took it over, or it was removed.
        """
        if self.lock is not None:
            self.lock.check()


@contextmanager
def in_folder(config: Config, control: Control, resume: Resume) -> Iterator[Place]:
    """Hold the folder of the run for this job. Collective.

    Raises:
        InputError: ranks differ, or do not see one folder; another job writes there; or as
            :func:`~megatron_fspo.job.folder.checkpoints_to_resume`.
    """
    prove_same(config, resume=resume)
    lock = _lock(config, control) if dist.get_rank() == 0 else None
    try:
        yield _agreed(config, control, lock, resume)
    finally:
        if lock is not None:
            lock.release()


def _lock(config: Config, control: Control) -> FolderLock:
    with control.waiting("the lock of the folder of the run") as wait:
        return FolderLock(config.run_folder, pause=wait.check, say=_say)


def _agreed(config: Config, control: Control, lock: FolderLock | None, resume: Resume) -> Place:
    """What the first rank found, on all of them. Collective."""
    if lock is None:
        nonce, names = json.loads(control.hear("the folder of the run to be locked"))
    else:
        # Looked at again: before it was locked, another job may have been at work.
        found = checkpoints_to_resume(config, resume, mine=lock.owner)
        nonce, names = lock.owner.nonce, [path.name for path in found]
        control.tell(json.dumps([nonce, names]))
    prove_folder_is_shared(config.run_folder, control, nonce)
    parent = checkpoint_folder(config, 0).parent
    return Place(checkpoints=tuple(parent / name for name in names), lock=lock, job=nonce)


def _say(line: str) -> None:
    print(f"megatron-fspo: {line}", file=sys.stderr, flush=True)
