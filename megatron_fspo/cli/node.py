"""What a node lacks for a run on GPUs, a line each: driver, limits, cores, shared memory."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

_DRIVER, _FILES, _SHARED = 580, 16_384, 1 << 30
"""Least version for CUDA 13, number of open files, and bytes of shared memory."""
_VERSION, _INFINIBAND = Path("/proc/driver/nvidia/version"), Path("/sys/class/infiniband")


def node_problems(gpus: int, cuda: str | None) -> Iterator[str]:
    """Yield what is wrong, for ranks on so many GPUs and the CUDA of torch (None: a build for CPUs)."""
    version = re.search(r"\b(\d{3,})\.[\d.]+", _VERSION.read_text() if _VERSION.exists() else "")
    if version is None:
        yield f"NVIDIA driver: none on this node; CUDA 13 needs {_DRIVER} or newer"
    elif int(version[1]) < _DRIVER and (cuda or "13").startswith("13"):
        yield f"NVIDIA driver {version[0]}: CUDA 13 needs {_DRIVER} or newer (or use torch for CUDA 12)"
    files, locked = (
        resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)
    )
    if 0 <= files < _FILES:
        yield (
            f"open files: {files} at most (ulimit -Hn); many nodes need {_FILES}: raise nofile in "
            f"/etc/security/limits.conf, or `docker run --ulimit nofile={_FILES}`"
        )
    if locked >= 0 and any(_INFINIBAND.glob("*")):
        yield (
            f"locked memory: {locked >> 10} KiB at most (ulimit -Hl); InfiniBand needs unlimited: raise "
            "memlock in /etc/security/limits.conf, or `docker run --ulimit memlock=-1`"
        )
    if (cores := len(os.sched_getaffinity(0))) < 2 * max(gpus, 1):
        yield (
            f"cores: {cores} for {max(gpus, 1)} ranks, which need 2 each; in Slurm "
            "`srun --cpus-per-task=$SLURM_CPUS_ON_NODE --cpu-bind=none`"
        )
    shared = os.statvfs("/dev/shm")
    if (size := shared.f_blocks * shared.f_frsize) < _SHARED:
        yield (
            f"shared memory: /dev/shm has {size >> 20} MiB, and NCCL and graders need {_SHARED >> 20}: "
            "`docker run --shm-size=16g` or `--ipc=host`"
        )
