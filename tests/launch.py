"""Starts real ranks: one launch per world size, many checks in each.

``torchrun`` is what users have; it costs 3 s of CPU time for each rank, and 2 s more. ``forked`` gives the
same ranks to a program nearly for nothing; what is tested there is the program, not its start.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from backend import FAKE
from rank_client import run_forked

REPO = Path(__file__).resolve().parent.parent


def environment(**extra: str) -> dict[str, str]:
    """The environment of a rank: this checkout first, no network, one thread."""
    kept = {
        key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    paths = [
        str(REPO),
        str(REPO / "tests"),
        str(REPO / "tests/mcore"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **extra,
    }


def python(
    *words: str, cwd: Path = REPO, timeout: float = 300, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python words...`` in a process that has imported nothing, and wait; output is captured."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=environment(**extra),
        timeout=timeout,
        capture_output=True,
        text=True,
    )


def torchrun(
    program: Sequence[str], *, nproc: int, cwd: Path = REPO, timeout: float = 300, **extra: str
) -> subprocess.CompletedProcess[str]:
    """The same on ``nproc`` ranks."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc))
    return python(*launcher, *program, cwd=cwd, timeout=timeout, **extra)


def forked(
    program: Sequence[str], *, nproc: int, cwd: Path = REPO, timeout: float = 300, **extra: str
) -> subprocess.CompletedProcess[str]:
    """The same from processes that have imported torch and Megatron; by torchrun where CUDA is: that does not
    survive a fork.

    Args:
        nproc: 0 for one process that is no rank.
        extra: more of the environment.
    """
    if not torch.cuda.is_available() or FAKE:
        return run_forked(program, nproc, cwd, environment(**extra), timeout)
    return torchrun(program, nproc=max(nproc, 1), cwd=cwd, timeout=timeout, **extra)


def found_by(worker: Path, folder: Path, *arguments: str, nproc: int, timeout: float = 300) -> Any:
    """Run a worker on real ranks, and return what it wrote as JSON to the file it was told."""
    out = folder / "found.json"
    run_worker(worker, str(out), *arguments, nproc=nproc, timeout=timeout)
    return json.loads(out.read_text(encoding="utf-8"))


def run_worker(worker: Path, *arguments: str, nproc: int, timeout: float = 300) -> str:
    """Run a worker file on real ranks; fail with its output if a rank failed."""
    result = forked([str(worker), *arguments], nproc=nproc, timeout=timeout)
    assert result.returncode == 0, (
        f"{worker.name} on {nproc} ranks: {first_error(result.stderr)}\n{result.stdout}\n{result.stderr}"
    )
    return result.stdout


def why(stderr: str) -> str:
    """For the message of an assertion: what ranks raised, which the tail may not hold, and the tail."""
    return f"{first_error(stderr)}\n{stderr[-6000:]}"


def first_error(stderr: str) -> str:
    """The line that says what the first rank to fail raised."""
    lines = (re.sub(r"^\[rank\d+\]: ", "", line) for line in stderr.splitlines())
    raised = re.compile(r"(megatron-fspo: )?[\w.]+(Error|Exception)\b|megatron-fspo: ")
    return next((line for line in lines if raised.match(line)), "no error is named")
