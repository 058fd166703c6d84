"""Training with rollouts from real vLLM servers, tensor parallel over two ranks. Needs VLLM_BIN."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from fake_vllm import until
from launch import REPO, environment
from runs import command, rows, run
from serving import Served, serving, without_repack

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("VLLM_BIN"), reason="VLLM_BIN names no vLLM to test with"),
]


PROMPT = [1, 2, 3, 4, 5, 6]
FLOAT32 = ("--dtype", "float32")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hardly trained, with the head size that vLLM's attention wants on a CPU; tied."""
    folder = tmp_path_factory.mktemp("make-sum")
    make = [sys.executable, "examples/make_sum/make_checkpoint.py", "--head-dim", "32", "--steps", "2"]
    subprocess.run(
        [*make, "--out", str(folder)], cwd=REPO, env=environment(), check=True, capture_output=True
    )
    return folder / "checkpoint"


def words(checkpoint: Path, servers: list[Served], steps: int, *more: str) -> list[str]:
    text = f"--model.checkpoint {checkpoint} --rollout.engine vllm --run.steps {steps}"
    # Hardly any response is right: the entropy bonus moves the weights.
    short = (
        "--rollout.max-response-tokens 24 --checkpoint.every 0 --evaluation.every 0 --loss.entropy-coef 0.1"
    )
    urls = ["--vllm.urls", str([server.url for server in servers])]
    return [*text.split(), *urls, *short.split(), *more]


@pytest.mark.parametrize("transfer", ["gloo", "disk"])
def test_twenty_updates_are_proven(checkpoint: Path, tmp_path: Path, transfer: str) -> None:
    flags = ("--dtype", "float32", "--backend", transfer)
    with serving(checkpoint, tmp_path, *flags) as servers:
        more = ("--vllm.transfer", transfer, "--rollout.temperature", "0.7")
        folder = ("--vllm.folder", str(tmp_path / "weights"))
        done = run(tmp_path, "run", *words(checkpoint, servers, 20, *more, *folder))
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

    def kill(server: Served) -> None:
        while not rows(tmp_path, "run"):
            time.sleep(0.05)
        killed.append(server.engine)
        killed[0].send_signal(signal.SIGKILL)

    with serving(checkpoint, tmp_path, *FLOAT32) as servers:
        killer = threading.Thread(target=kill, args=servers)
        killer.start()
        more = ("--rollout.prompts", "64", "--rollout.max-response-tokens", "100")
        done = run(tmp_path, "run", *words(checkpoint, servers, 5, *more))
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
    with serving(checkpoint, tmp_path, "--dtype", "bfloat16") as servers:
        done = run(tmp_path, "run", *words(checkpoint, servers, 2))
    assert done.returncode != 0
    assert (
        f"megatron-fspo: {servers[0].url} does not have the trainer's weights after the update to version 0"
        in done.stderr
    )
    assert "The loaded weights agree (" in done.stderr
    assert "Types here and there: float32 and bfloat16" in done.stderr
    assert not [row for row in rows(tmp_path, "run") if row["step"] > 0]


def test_a_head_that_stays_behind_stops_the_run(checkpoint: Path, tmp_path: Path) -> None:
    """vLLM on a CPU packs the head of a tied model once and for all, were it not for our plugin."""
    flags = ("--vllm", without_repack(tmp_path), *FLOAT32)
    with serving(checkpoint, tmp_path, *flags) as servers:
        done = run(tmp_path, "run", *words(checkpoint, servers, 3))
        version = servers[0].routes.version
    assert done.returncode != 0
    # The update to version 0 brings what the server was started with: nothing is wrong yet.
    assert version == "1"
    lines = done.stderr.splitlines()
    (first,) = {n for n, line in enumerate(lines) if "does not have the trainer's weights" in line}
    assert lines[first].startswith(
        f"megatron-fspo: {servers[0].url} does not have the trainer's weights after "
    )
    assert "after the update to version 1: " in lines[first]
    assert lines[first + 1].startswith("The loaded weights agree (")
    assert "; what is computed with differs: stale packed copies (1); " in lines[first + 1]
    assert lines[first + 2].startswith("  model.embed_tokens.weight (packed): ")
    assert [row["step"] for row in rows(tmp_path, "run")] in ([], [0]), "no step of which it is not known"


@contextmanager
def training(folder: Path, *more: str) -> Iterator[Callable[[Callable[[], object], str], None]]:
    """A run in the background, which SIGTERM ends; yields what waits for a condition while it runs."""
    job = subprocess.Popen(
        command(folder, "run", *more),
        cwd=REPO,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def wait(condition: Callable[[], object], what: str) -> None:
        until(lambda: job.poll() is not None or condition(), what, seconds=200)
        assert job.poll() is None, job.communicate()[0][-6000:]

    try:
        yield wait
        for child in psutil.Process(job.pid).children(recursive=True):
            if "RANK" in child.environ() and "train" in child.cmdline():
                child.send_signal(signal.SIGTERM)
        assert "stopped by SIGTERM" in job.communicate(timeout=200)[0]
    finally:
        job.kill()
        job.communicate()


def test_two_servers_and_one_of_them_is_killed(checkpoint: Path, tmp_path: Path) -> None:
    """Both serve; one goes on alone; the other comes back, and has the weights of the day."""
    more = ("--rollout.prompts", "16", "--rollout.max-response-tokens", "60")
    with serving(checkpoint, tmp_path, *FLOAT32, count=2) as servers:
        stays, dies = servers
        with training(tmp_path, *words(checkpoint, servers, 1000, *more)) as wait:
            wait(lambda: len(steps(tmp_path)) >= 2, "two steps")
            assert stays.answered > 0 < dies.answered
            wait(lambda: dies.open > 0, "a request under way")
            dies.engine.send_signal(signal.SIGKILL)
            wait(lambda: 1.0 in servers_of(tmp_path), "an update of one server")
            dies.until_ready("vLLM is ready again at")
            alone = len(steps(tmp_path))
            wait(lambda: 2.0 in servers_of(tmp_path)[alone:], "an update of both")
            wait(lambda: dies.answered > 0, "a request of the new server")
        assert stays.routes.version == dies.routes.version
        assert (stays.routes.score(PROMPT) - dies.routes.score(PROMPT)).abs().max() < 1e-4
    done = steps(tmp_path)
    assert [row["training/weight_version"] for row in done] == list(range(1, len(done) + 1))
    assert all(row["rollout/canary_abs_diff_max"] <= 1e-4 for row in done)
    # Responses of older weights, or of the checkpoint that a server starts with, would show here.
    assert all(row["rollout/logprob_abs_diff/max"] <= 1e-3 for row in done)
    # Of 16 prompts, 4 each; the first of four mini-batches is on policy and not in the file.
    assert {len(row["length"]) for row in rows(tmp_path, "run", "sequences.jsonl")} == {3 * 16}


def steps(folder: Path) -> list[dict[str, Any]]:
    return [row for row in rows(folder, "run") if row["step"] > 0]


def servers_of(folder: Path) -> list[float]:
    """In rotation after each step's update."""
    return [row["rollout/servers"] for row in steps(folder)]
