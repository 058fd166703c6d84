"""``megatron-fspo serve`` of a real vLLM, and the ends of those who use it. Needs VLLM_BIN."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fake_vllm import is_running, until
from launch import environment
from real_server import FLAGS, Routes, distance, make_checkpoint, send, weights
from test_serve import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TOLERANCE = 1e-4
FAR = 0.1

# The first trainer: it sends some buckets, says so, and hangs.
TRAINER = """
import sys, time
from functools import partial
from pathlib import Path
from megatron_fspo.rollout.client import weights as client_weights
from real_server import send, weights

client_weights.in_buckets = partial(client_weights.in_buckets, bucket_bytes=2**15)

class Slow(dict):
    def items(self):
        for number, pair in enumerate(super().items()):
            if number == 12:
                print("half", flush=True)
                time.sleep(600)
            yield pair

send(sys.argv[1], Slow(weights(Path(sys.argv[2]))), 7)
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return [make_checkpoint(folder / str(seed), tied=True, seed=seed) for seed in (0, 1)]


Start = Callable[..., tuple[Routes, psutil.Process, list[psutil.Process]]]


@pytest.fixture
def start(checkpoints: list[Path], tmp_path: Path) -> Iterator[Start]:
    """Starts ``serve`` as the child of a program that knows nothing of it; its parent, and all below that."""
    started: list[psutil.Process] = []

    def serve(*words: str) -> tuple[Routes, psutil.Process, list[psutil.Process]]:
        port, out = free_port(), tmp_path / "out"
        command = [sys.executable, "-m", "megatron_fspo", "serve", "--model", str(checkpoints[0])]
        command += ["--port", str(port), "--log", str(tmp_path / "log"), *words, "--", *FLAGS]
        with out.open("wb") as file:
            parent = psutil.Popen(
                [sys.executable, "-c", f"import subprocess; subprocess.run({command})"],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment(),
            )
        started.append(parent)
        until(lambda: "is ready" in out.read_text() or parent.poll() is not None, "ready", seconds=300)
        assert parent.poll() is None, out.read_text()
        family = parent.children(recursive=True)
        started.extend(family)
        assert len(family) >= 4, out.read_text()
        return Routes(f"http://127.0.0.1:{port}"), parent, family

    yield serve
    for process in started:
        if is_running(process.pid):
            process.kill()


def running(family: list[psutil.Process]) -> bool:
    return any(is_running(process.pid) for process in family)


def test_a_server_kept_alive_serves_the_next_trainer(start: Start, checkpoints: list[Path]) -> None:
    """Also if the one before was killed in the middle of an update."""
    old, new = checkpoints
    routes, parent, family = start("--keep-alive", "--dtype", "float32")
    parent.kill()
    parent.wait()
    with pytest.raises(AssertionError):
        until(lambda: not running(family), "an end that must not come", seconds=3)
    assert distance(routes, old) < TOLERANCE

    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, routes.url, str(new)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(PYTHONPATH=os.pathsep.join(sys.path)),
    ) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "half\n"
        trainer.send_signal(signal.SIGKILL)
    assert routes.ask("/is_paused") == (200, {"is_paused": True}), "it answers nobody with half of an update"
    assert routes.version == "default"

    assert send(routes.url, weights(new), 1) is None
    assert distance(routes, new) < TOLERANCE < FAR < distance(routes, old)
    assert routes.version == "1"

    serve = family[0]
    assert "serve" in serve.cmdline()
    serve.terminate()
    until(lambda: not running(family), "the end of all", seconds=60)
