"""The run folder while a job holds it: consistency checks, lock, and status files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from megatron_fspo.config import Config
from megatron_fspo.job.consistency import prove_folder_is_shared, prove_same
from megatron_fspo.job.hang import make_folder
from megatron_fspo.job.lock import REFRESH_SECONDS, FolderLock, FolderThread
from megatron_fspo.job.rank_status import ENDED, FAILED, Activity, status_writer
from megatron_fspo.job.resume import Resume, checkpoint_folder, checkpoints_to_resume
from megatron_fspo.parallel.control import Control


class RunFolder:
    """A run folder held by this job. Only the first rank has the ``lock``; all ranks have its nonce, ``job``.

    ``checkpoints`` are those from which the run may continue, oldest first, as listed by the first rank.
    """

    def __init__(
        self, path: Path, control: Control, checkpoints: Sequence[Path], lock: FolderLock | None, job: str
    ) -> None:
        self.checkpoints = tuple(checkpoints)
        self._path, self._control, self._lock, self._job = path, control, lock, job
        self._thread: FolderThread | None = None

    def check(self) -> None:
        """Raise ``TrainingError`` if another job took over the folder, or it was removed."""
        if self._lock is not None:
            self._lock.check()

    def report(self, activity: Activity) -> None:
        """Start to keep this rank's status file up to date with ``activity``."""
        rank, size = dist.get_rank(), dist.get_world_size()
        self._activity = activity
        self._write = status_writer(
            self._path, self._job, activity, lambda: self._control.waits, rank=rank, size=size
        )
        self._write()
        if self._lock is not None:
            self._thread = self._lock.thread
            self._thread.writes.append(self._write)
        else:  # first pauses differ, to spread the load of the file server
            self._thread = FolderThread(self._write, first=1 - rank % 16 / 32)

    def close(self, phase: str) -> None:
        """Write ``phase`` as the final one into this rank's status file, if :meth:`report` was called."""
        if self._thread is not None and self._thread.close(REFRESH_SECONDS):
            self._activity.phase = phase
            self._write()


@contextmanager
def hold_run_folder(
    config: Config, control: Control, resume: Resume, also: Mapping[str, str]
) -> Iterator[RunFolder]:
    """Lock the run folder for this job, for the duration of the context. ``also``: further facts that must
    not differ between ranks. Collective.

    Raises:
        InputError: ranks differ, or do not share the folder; another job holds it; or as
            :func:`~megatron_fspo.job.resume.checkpoints_to_resume`.
    """
    prove_same(config, also, resume=resume)
    path, lock = config.run_folder, None
    if dist.get_rank() == 0:
        with control.waiting("the lock of the run folder") as wait:
            lock = FolderLock(path, pause=wait.check)
    try:
        if lock is None:
            nonce, names = json.loads(control.receive("the run folder to be locked"))
        else:
            # Listed again, because another job may have written checkpoints before the lock was taken.
            names = [path.name for path in checkpoints_to_resume(config, resume, mine=lock.owner)]
            nonce = lock.owner.nonce
            control.broadcast(json.dumps([nonce, names]))
        prove_folder_is_shared(path, control, nonce)
        parent = checkpoint_folder(config, 0).parent
        folder = RunFolder(path, control, [parent / name for name in names], lock, nonce)
        make_folder()
        last = FAILED
        try:
            yield folder
            last = ENDED
        finally:
            folder.close(last)
    finally:
        if lock is not None:
            lock.release()
