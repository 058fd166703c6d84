"""A job holds the folder of its run: all ranks have the same run in hand, and write there what they do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from megatron_fspo.config import Config
from megatron_fspo.job.consistency import prove_folder_is_shared, prove_same
from megatron_fspo.job.folder import Resume, checkpoint_folder, checkpoints_to_resume
from megatron_fspo.job.lock import REFRESH_SECONDS, FolderLock, FolderThread
from megatron_fspo.job.rank_status import ENDED, FAILED, Activity, status_writer
from megatron_fspo.parallel.control import Control


class RunFolder:
    """The folder of a run, held by this job, whose ``lock`` is on the first rank, and its nonce on all.

    ``checkpoints`` are those that the run may go on from, oldest first, as the first rank saw them.
    """

    def __init__(
        self, path: Path, control: Control, checkpoints: Sequence[Path], lock: FolderLock | None, job: str
    ) -> None:
        self.checkpoints = tuple(checkpoints)
        self._path, self._control, self._lock, self._job = path, control, lock, job
        self._thread: FolderThread | None = None

    def check(self) -> None:
        """Do nothing while the folder is this job's.

        Raises:
            TrainingError: another job took it over, or it was removed.
        """
        if self._lock is not None:
            self._lock.check()

    def report(self, activity: Activity) -> None:
        """Keep the file of this rank up to date from here on, with what its main thread does."""
        rank, size = dist.get_rank(), dist.get_world_size()
        self._activity = activity
        self._write = status_writer(
            self._path, self._job, activity, lambda: self._control.waits, rank=rank, size=size
        )
        self._write()
        if self._lock is not None:
            self._thread = self._lock.thread
            self._thread.writes.append(self._write)
        else:  # ranks that started together do not come to the file server together
            self._thread = FolderThread(self._write, first=1 - rank % 16 / 32)

    def close(self, phase: str) -> None:
        """Leave the phase as the last word in the file of this rank, if it has one."""
        if self._thread is not None and self._thread.close(REFRESH_SECONDS):
            self._activity.phase = phase
            self._write()


@contextmanager
def hold_run_folder(config: Config, control: Control, resume: Resume) -> Iterator[RunFolder]:
    """Hold the folder of the run for this job. Collective.

    Raises:
        InputError: ranks differ, or do not see one folder; another job writes there; or as
            :func:`~megatron_fspo.job.folder.checkpoints_to_resume`.
    """
    prove_same(config, resume=resume)
    path, lock = config.run_folder, None
    if dist.get_rank() == 0:
        with control.waiting("the lock of the folder of the run") as wait:
            lock = FolderLock(path, pause=wait.check)
    try:
        if lock is None:
            nonce, names = json.loads(control.hear("the folder of the run to be locked"))
        else:
            # Looked at again: before it was locked, another job may have been at work.
            names = [path.name for path in checkpoints_to_resume(config, resume, mine=lock.owner)]
            nonce = lock.owner.nonce
            control.tell(json.dumps([nonce, names]))
        prove_folder_is_shared(path, control, nonce)
        parent = checkpoint_folder(config, 0).parent
        folder = RunFolder(path, control, [parent / name for name in names], lock, nonce)
        last = FAILED
        try:
            yield folder
            last = ENDED
        finally:
            folder.close(last)
    finally:
        if lock is not None:
            lock.release()
