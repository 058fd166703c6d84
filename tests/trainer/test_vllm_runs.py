"""Training with rollouts from a real vLLM server, tensor parallel over two ranks. Needs VLLM_BIN."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from launch import REPO, environment
from runs import rows, run
from test_serve import free_port

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("VLLM_BIN"), reason="VLLM_BIN names no vLLM to test with"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hardly trained, with the head size that vLLM's attention wants on a CPU; tied."""
    folder = tmp_path_factory.mktemp("make-sum")
    make = [sys.executable, "examples/make_sum/make_checkpoint.py", "--head-dim", "32", "--steps", "2"]
    subprocess.run(
        [*make, "--out", str(folder)], cwd=REPO, env=environment(), check=True, capture_output=True
    )
    return folder / "checkpoint"


@contextmanager
def served(checkpoint: Path, log: Path, *flags: str) -> Iterator[tuple[str, psutil.Process]]:
    """``megatron-fspo serve``: its URL and process."""
    port = free_port()
    words = ["--model", str(checkpoint), "--port", str(port), "--log", str(log), *flags]
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_fspo", "serve", *words],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("vLLM is ready"), log.read_text()[-3000:]
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def words(checkpoint: Path, url: str, steps: int, *more: str) -> list[str]:
    text = f"--model.checkpoint {checkpoint} --rollout.engine vllm --vllm.urls ['{url}'] --run.steps {steps}"
    # Hardly any response is right: the entropy bonus moves the weights.
    short = (
        "--rollout.max-response-tokens 24 --checkpoint.every 0 --evaluation.every 0 --loss.entropy-coef 0.1"
    )
    return [*text.split(), *short.split(), *more]


@pytest.mark.parametrize("transfer", ["gloo", "disk"])
def test_twenty_updates_are_proven(checkpoint: Path, tmp_path: Path, transfer: str) -> None:
    flags = ("--dtype", "float32", "--backend", transfer)
    with served(checkpoint, tmp_path / "log", *flags) as (url, _):
        more = ("--vllm.transfer", transfer, "--rollout.temperature", "0.7")
        folder = ("--vllm.folder", str(tmp_path / "weights"))
        done = run(tmp_path, "run", *words(checkpoint, url, 20, *more, *folder))
        assert done.returncode == 0, done.stderr[-6000:]
    steps = rows(tmp_path, "run")
    assert [row["training/weight_version"] for row in steps] == list(range(1, 21))
    assert all(0 < row["rollout/canary_abs_diff_max"] <= 1e-4 for row in steps)
    assert all(row["rollout/logprob_abs_diff/mean"] <= 1e-4 for row in steps)
    assert all(row["actor/grad_norm"] > 0 for row in steps)
    assert not [path for path in (tmp_path / "weights").glob("*")]


def test_a_server_killed_in_the_middle_comes_back_with_current_weights(
    checkpoint: Path, tmp_path: Path
) -> None:
    killed = []

    def kill(server: psutil.Process) -> None:
        while not rows(tmp_path, "run"):
            time.sleep(0.05)
        for child in server.children(recursive=True):
            if "EngineCore" in child.name():
                killed.append(child.pid)
                child.send_signal(signal.SIGKILL)

    with served(checkpoint, tmp_path / "log", "--dtype", "float32") as (url, server):
        killer = threading.Thread(target=kill, args=(server,))
        killer.start()
        more = ("--rollout.prompts", "64", "--rollout.max-response-tokens", "100")
        done = run(tmp_path, "run", *words(checkpoint, url, 5, *more))
        killer.join()
        assert done.returncode == 0, done.stderr[-6000:]
    assert killed
    steps = rows(tmp_path, "run")
    assert [row["training/weight_version"] for row in steps] == [1, 2, 3, 4, 5]
    assert all(row["rollout/canary_abs_diff_max"] <= 1e-4 for row in steps)
    # A response of older weights, or of the checkpoint the server was started with, would show here.
    assert all(row["rollout/logprob_abs_diff/max"] <= 1e-3 for row in steps)


def test_a_server_with_other_weights_stops_the_run(checkpoint: Path, tmp_path: Path) -> None:
    """Here: rounded to bfloat16, while the trainer's are float32."""
    with served(checkpoint, tmp_path / "log", "--dtype", "bfloat16") as (url, _):
        done = run(tmp_path, "run", *words(checkpoint, url, 2))
    assert done.returncode != 0
    assert (
        f"megatron-fspo: {url} does not have the trainer's weights after the update to version 0"
        in done.stderr
    )
    assert not [row for row in rows(tmp_path, "run") if row["step"] > 0]
