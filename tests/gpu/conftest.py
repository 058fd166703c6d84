"""Fixtures: requirements of a test on the machine, the measurements, and the table at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_table import Row, as_markdown

from backend import FAKE
from launch import REPO, environment, run_worker, why

WORKER = Path(__file__).with_name("gpu_worker.py")
FOLDERS = ("tests/gpu", "tests/rollout", "benchmarks")
ROWS = pytest.StashKey[list[Row]]()
MACHINE = pytest.StashKey[dict[str, Any]]()
# Measurements of one process, as a start takes as long as most of them: on a fake GPU all of one rank.
HEADS = ["head:ours", "head:naive", "head:checkpoint"]
KERNELS = ["head:chunks", *(f"head:kernels {gib}" for gib in (0, 1, 16))]
FP8 = [
    [f"{kind}:{recipe}" for kind in ("quantizer", "fp8")] for recipe in ("tensorwise", "blockwise", "mxfp8")
]
TOGETHER = (
    [["machine", *FP8[0], "step:none", "step:tensorwise", "decoding", *HEADS, "send"]]
    if FAKE
    else [HEADS + KERNELS, *FP8]
)
Measure = Callable[..., dict[str, Any]]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """``measured(name, ranks=1)`` takes a measurement of gpu_worker.py, in a process of its own or of its
    kind, so that an error of a kernel ends no others.
    """
    known: dict[tuple[str, int], dict[str, Any]] = {}
    paths = os.pathsep.join(str(REPO / folder) for folder in FOLDERS)

    def measure(name: str, ranks: int = 1) -> dict[str, Any]:
        if (name, ranks) not in known:
            names = next((some for some in TOGETHER if name in some and ranks == 1), [name])
            out = tmp_path_factory.mktemp("measured") / "found.json"
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TEST_BACKEND", "cuda")
                patch.setenv("PYTHONPATH", os.pathsep.join([paths, os.environ.get("PYTHONPATH", "")]))
                _start([str(out), *names], ranks)
            for one, found in json.loads(out.read_text(encoding="utf-8")).items():
                known[one, ranks] = found
        found = known[name, ranks]
        assert "failed" not in found, f"{name} on {ranks} ranks:\n{found['failed']}"
        return found

    return measure


def _start(words: list[str], ranks: int) -> None:
    if ranks > 1:
        run_worker(WORKER, *words, nproc=ranks, timeout=900)
        return
    command = [sys.executable, str(WORKER), *words]
    done = subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{' '.join(words[1:])}: {why(done.stderr)}"


@pytest.fixture(scope="session")
def machine(measured: Measure, request: pytest.FixtureRequest) -> dict[str, Any]:
    """GPUs and versions; asked in a process of its own, as it takes memory of a GPU to ask."""
    found = measured("machine")
    request.config.stash[MACHINE] = found
    return found


@pytest.fixture
def needs(machine: dict[str, Any]) -> Callable[..., None]:
    """Skips the test, and says why, unless the machine has all that is asked for."""

    def need(
        *, gpus: int = 1, engine: bool = False, recipe: str | None = None, real: str | None = None
    ) -> None:
        if FAKE and real is not None:
            pytest.skip(f"on a fake GPU: {real}")
        if machine["count"] < gpus:
            pytest.skip(f"needs {gpus} GPUs; there is {machine['count']}")
        if (engine or recipe) and machine["engine"] is not None:
            pytest.skip(machine["engine"])
        if recipe and machine["fp8"][recipe] is not None:
            pytest.skip(f"FP8 {recipe}: {machine['fp8'][recipe]}")
        if FAKE and recipe not in (None, "tensorwise"):
            pytest.skip("on a fake GPU: there are reference quantizers for tensorwise only")

    return need


@pytest.fixture
def table(request: pytest.FixtureRequest, machine: dict[str, Any]) -> Callable[..., None]:
    """``table(item, what, value, beside, unit)`` adds a line."""

    def add(item: str, what: str, value: Any, beside: Any = "", unit: str = "") -> None:
        row = Row(item=item, what=what, value=value, beside=beside, unit=unit)
        request.config.stash[ROWS].append(row)

    return add


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash[ROWS]
    if not rows:
        return
    found = config.stash[MACHINE]
    passed = len(terminalreporter.stats.get("passed", []))
    page = as_markdown(rows, found, passed, _others(terminalreporter))
    terminalreporter.write_line(page)
    if FAKE:
        terminalreporter.write_line("A fake GPU and tiny sizes: that it runs is all that this says.")
    if file := os.environ.get("GPU_TABLE"):
        Path(file).write_text(page, encoding="utf-8")
        terminalreporter.write_line(f"written to {file}")


def _others(reporter: Any) -> list[str]:
    """Tests that did not pass, and why."""
    skipped = [
        f"{report.nodeid}: {report.longrepr[2].removeprefix('Skipped: ')}"
        for report in reporter.stats.get("skipped", [])
    ]
    broken = [report for kind in ("failed", "error") for report in reporter.stats.get(kind, [])]
    return [*(f"{report.nodeid}: **failed**" for report in broken), *skipped]
