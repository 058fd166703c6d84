"""``megatron-fspo serve`` with a real vLLM, for tests: several at once, or with a plugin that is broken."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from fake_vllm import is_running, until
from launch import environment
from real_server import Routes, bearer
from test_serve import free_port


class Served:
    """One ``megatron-fspo serve``, running."""

    def __init__(self, checkpoint: Path, log: Path, *flags: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._out = log.with_suffix(".out")
        words = ["--model", str(checkpoint), "--port", str(self.port), "--log", str(log), *flags]
        with self._out.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megatron_fspo", "serve", *words],
                # By itself every server binds its worker to the first core, where they would be in the way.
                env=environment(VLLM_CPU_OMP_THREADS_BIND="nobind"),
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> str:
        return self._out.read_text()

    @property
    def routes(self) -> Routes:
        return Routes(self.url)

    @property
    def starts(self) -> int:
        """How often it was ready, the restarts included."""
        return self.said.count("vLLM is ready")

    def until_ready(self, starts: int = 1) -> None:
        until(
            lambda: self.starts >= starts or self.process.poll() is not None, f"start {starts}", seconds=300
        )
        assert self.starts >= starts, self.said + self.log.read_text(errors="replace")[-3000:]

    def until_healthy(self) -> None:
        """It may have been killed, and be about to come back."""

        def healthy() -> bool:
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=30) as answer:
                return answer.status == 200
            return False

        until(healthy, "health", seconds=300)

    @property
    def engine(self) -> psutil.Process:
        """The process that computes."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        (core,) = [child for child in family if "EngineCore" in child.name()]
        return core

    def count(self, metric: str) -> float:
        """Of one of vLLM's metrics, the sum over its labels."""
        request = urllib.request.Request(f"{self.url}/metrics", headers=bearer())
        with urllib.request.urlopen(request, timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if re.match(rf"vllm:{metric}(_total)?[{{ ]", line)
        )

    @property
    def answered(self) -> float:
        """Requests since it started."""
        return self.count("request_success")

    @property
    def open(self) -> float:
        """Requests under way."""
        return self.count("num_requests_running")

    def stop(self) -> None:
        """End it, and see that nothing of it is left."""
        if self.process.poll() is not None:
            return
        family = psutil.Process(self.process.pid).children(recursive=True)
        for child in family:
            if is_running(child.pid):
                child.send_signal(signal.SIGCONT)
        self.process.terminate()
        self.process.wait(60)
        until(lambda: not any(is_running(child.pid) for child in family), "the end of all")


@contextmanager
def serving(checkpoint: Path, folder: Path, *flags: str, count: int = 1) -> Iterator[list[Served]]:
    """Servers of a checkpoint, started together and ready; their logs are in ``folder``."""
    with ExitStack() as stack:
        servers = []
        for number in range(count):
            servers.append(Served(checkpoint, folder / f"vllm-{number}.log", *flags))
            stack.callback(servers[-1].stop)
        for server in servers:
            server.until_ready()
        yield servers


_STALE = """\
def register():
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    names = {"gloo": "GlooTransfer", "disk": "DiskTransfer"}

    def loader(name):
        def load():
            from megatron_fspo.rollout.server.inside import transfer

            transfer.repack = lambda model: 0
            return getattr(transfer, name)

        return load

    for backend, name in names.items():
        Factory._registry[backend] = loader(name)
"""


def without_repack(folder: Path) -> str:
    """Path of a ``vllm`` with a second plugin, which takes repack() out of ours, in all of its processes."""
    (folder / "stale.py").write_text(_STALE)
    entry = folder / "stale-1.dist-info"
    entry.mkdir()
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: stale\nVersion: 1\n")
    (entry / "entry_points.txt").write_text("[vllm.general_plugins]\nstale = stale:register\n")
    for name in ("vllm", "python"):
        program = folder / name
        real = Path(os.environ["VLLM_BIN"]).parent / name
        program.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {real} "$@"\n')
        program.chmod(0o755)
    return str(folder / "vllm")
