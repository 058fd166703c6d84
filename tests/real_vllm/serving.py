"""``megatron-fspo serve`` with a real vLLM, for tests: several at once, or with a plugin that is broken."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import psutil

from fake_vllm import Serve, is_running, until
from real_server import HTTP, Routes, bearer


class Served(Serve):
    """One ``megatron-fspo serve``, running."""

    @property
    def routes(self) -> Routes:
        return Routes(self.url)

    def until_healthy(self) -> None:
        """It may have been killed, and be about to come back."""

        def healthy() -> bool:
            with suppress(httpx.TransportError):
                return HTTP.get(f"{self.url}/health").status_code == 200
            return False

        until(healthy, "health", seconds=300)

    @property
    def engine(self) -> psutil.Process:
        """The process that computes."""
        (core,) = [child for child in self.family if "EngineCore" in child.name()]
        return core

    def count(self, metric: str) -> float:
        """Of one of vLLM's metrics, the sum over its labels."""
        lines = HTTP.get(f"{self.url}/metrics", headers=bearer()).text.splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if re.match(rf"vllm:{metric}(_total)?[{{ ]", line)
        )

    def stop(self) -> None:
        """End it, and see that nothing of it is left."""
        family = self.family
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

    def load():
        from megatron_fspo.rollout.server.inside import transfer

        transfer.repack = lambda model: 0
        return transfer.GlooTransfer

    Factory._registry["gloo"] = load
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
