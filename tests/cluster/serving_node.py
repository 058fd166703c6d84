"""``megatron-fspo serve`` on a node of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from launch import environment, forked, why
from nodes import Nodes, environment_of_a_node

PORT = 8000
KEY = "a-secret-of-32-letters-and-digits"


def wide_checkpoint(folder: Path) -> Path:
    """make-sum's, hardly trained, tied, with the head size that vLLM's attention wants on a CPU."""
    make = ["examples/make_sum/make_checkpoint.py", "--head-dim", "32", "--steps", "2", "--out", str(folder)]
    made = forked(make, nproc=0)
    assert made.returncode == 0, why(made.stderr)
    return folder / "checkpoint"


@contextmanager
def serving_on(
    nodes: Nodes, node: str, checkpoint: Path, folder: Path, *, again: bool = False
) -> Iterator[Path]:
    """A real vLLM of a checkpoint; the folder where it announces itself.

    :data:`KEY`, which it asks for, is in the environment meanwhile.

    Args:
        again: start ``serve`` anew where it has given its vLLM up, as the scheduler of a cluster does.
    """
    log, servers = folder / "vllm.log", folder / "servers"
    words = ["--model", str(checkpoint), "--host", nodes.address(node), "--port", str(PORT)]
    words += ["--log", str(log), "--announce", str(servers), "--dtype", "float32"]
    words += ["--", "--max-model-len", "128", "--max-num-seqs", "32"]
    os.environ["VLLM_API_KEY"] = KEY
    # By itself every server binds its worker to the first core, where others would be in the way.
    env = environment_of_a_node(environment(VLLM_CPU_OMP_THREADS_BIND="nobind"))
    out = log.with_suffix(".out")
    with out.open("w") as file:
        program = [sys.executable, "-m", "megatron_fspo", "serve", *words]
        loop = ["bash", "-c", 'until "$@"; do sleep 1; done', "again"] if again else []
        process = nodes.start(node, [*loop, *program], env=env, stdout=file, stderr=subprocess.STDOUT)
    try:
        while "is ready" not in out.read_text():
            assert process.poll() is None, out.read_text() + log.read_text(errors="replace")[-3000:]
            time.sleep(0.2)
        yield servers
    finally:
        del os.environ["VLLM_API_KEY"]
        if again:
            process.kill()  # the loop first, then what it runs
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
                while process.poll() is None or os.killpg(process.pid, 0) is None:
                    time.sleep(0.1)
        process.terminate()
        process.wait(60)
