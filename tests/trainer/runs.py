"""Whole training runs as processes, on a make-sum configuration cut small."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch import REPO, forked, why

CONFIG = REPO / "examples/make_sum/run.toml"
SMALL = (
    "--rollout.prompts 8 --rollout.samples 4 --batch.mini-batches 4 --batch.epochs 1 --optimizer.lr 3e-4 "
    "--optimizer.warmup-steps 0 --optimizer.lr-decay cosine --optimizer.lr-decay-steps 40 "
    "--loss.calibrate 3 --evaluation.samples 2 --evaluation.every 2 --log.tokens 8 "
    "--rollout.max-response-tokens 40"
).split()


PROGRAM = ("-m", "megatron_fspo")
Done = subprocess.CompletedProcess[str]


def command(folder: Path, name: str, *extra: str, program: Sequence[str] = PROGRAM) -> list[str]:
    """``train`` of the small run on two ranks, writing under ``folder``."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return [*launcher, *program, *train_words(folder, name, *extra)]


def train_words(folder: Path, name: str, *extra: str) -> list[str]:
    """The arguments of the program."""
    place = ["--run.folder", str(folder), "--run.name", name]
    return ["train", "--config", str(CONFIG), *place, *SMALL, *extra]


def run(folder: Path, name: str, *extra: str, nproc: int = 2, **more: str) -> Done:
    """Train to the end, forked; output is captured. With ``DRAW_REPORT="1"``, the report is drawn, too."""
    words = train_words(folder, name, *extra)
    return forked([*PROGRAM, *words], nproc=nproc if nproc > 1 else 0, **more)


def trained(folder: Path, name: str, *extra: str, nproc: int = 2, **more: str) -> str:
    """:func:`run`, which has to succeed; what it printed."""
    done = run(folder, name, *extra, nproc=nproc, **more)
    assert done.returncode == 0, f"{name}: {why(done.stderr)}"
    return done.stdout


def faulty(folder: Path, name: str, fault: Sequence[str], *extra: str) -> Done:
    """:func:`run` with a fault of ``faulty_run.py``, and its arguments."""
    worker = str(Path(__file__).with_name("faulty_run.py"))
    return forked([worker, *fault, ":", *train_words(folder, name, *extra)], nproc=2)


def rows(folder: Path, name: str, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The logged rows."""
    path = folder / name / file
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what the clock decides."""
    return {key: value for key, value in row.items() if not key.startswith(("timing_s/", "perf/"))}
