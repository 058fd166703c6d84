"""What a job of a run computes on: processors and versions, for the report of the run."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fspo.job.consistency import versions
from megatron_fspo.mcore.backend import Backend

_CPUINFO = Path("/proc/cpuinfo")


def machine(backend: Backend) -> dict[str, Any]:
    """Of the first rank's machine, as JSON types: ``processes`` of the job, their ``device`` by name, the
    ``cpu`` and its ``cores``, whose ``layers``, and the ``versions`` of packages."""
    cpu = cpu_name(_CPUINFO.read_text(encoding="utf-8", errors="replace") if _CPUINFO.exists() else "")
    cuda = {"CUDA": torch.version.cuda} if backend.device.type == "cuda" and torch.version.cuda else {}
    return {
        "processes": dist.get_world_size(),
        "device": torch.cuda.get_device_name(backend.device) if backend.device.type == "cuda" else "CPU",
        "cpu": cpu,
        "cores": os.cpu_count(),
        "layers": backend.layers,
        "versions": {"Python": platform.python_version(), **versions(), **cuda},
    }


def cpu_name(cpuinfo: str) -> str:
    """From the text of Linux's ``/proc/cpuinfo``; the architecture where that does not say."""
    found = re.search(r"^model name\s*:\s*(\S.*?)\s*$", cpuinfo, re.MULTILINE)
    return found[1] if found else platform.machine()
