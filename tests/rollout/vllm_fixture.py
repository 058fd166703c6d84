"""A real vLLM server for tests, on a CPU. ``VLLM_BIN`` names the program; it has its own environment."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch

VOCAB_SIZE = 512
MAX_MODEL_LEN = 512
EOS = 7
"""In the checkpoint's configuration, and of no meaning to a rollout."""
START_SECONDS = 300


def tiny_checkpoint(folder: Path) -> Path:
    """A random Qwen3, spread widely enough that tokens are far from equally likely."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM's attention on a CPU takes 32, 64, …
        tie_word_embeddings=False,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.15,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        eos_token_id=EOS,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


class VllmServer:
    """``vllm serve`` on a port that stays the same over restarts."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self.checkpoint = tiny_checkpoint(folder / "model")
        self._log = folder / "vllm.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [self._program, "serve", str(self.checkpoint), "--served-model-name", "policy"]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "--dtype", "float32"]
        command += ["--enforce-eager", "--max-model-len", str(MAX_MODEL_LEN), "--generation-config", "vllm"]
        command += ["--enable-scale-out", "--skip-tokenizer-init", "--logprobs-mode", "processed_logprobs"]
        environment = {
            **os.environ,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("PYTHONPATH", None)  # it would bring this environment's packages into vLLM's
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        """Until it serves."""
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urlopen(f"{self.url}/health", timeout=5):
                    return
            except (URLError, OSError):
                time.sleep(0.5)
        pytest.fail(f"vLLM did not start:\n{self._log.read_text(errors='replace')[-4000:]}")

    def kill(self) -> None:
        """SIGKILL to the server and its workers."""
        if self._process is not None:
            # The group outlives its leader as long as a worker lives.
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.wait()
            self._process = None


@pytest.fixture(scope="module")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A server with a tiny random model; a test may kill it, and then starts it again."""
    program = os.environ.get("VLLM_BIN")
    if not program:
        pytest.skip("VLLM_BIN is unset: it names the `vllm` program to test with")
    server = VllmServer(program, tmp_path_factory.mktemp("vllm"))
    try:
        server.start()
        server.wait()
        yield server
    finally:
        server.kill()
