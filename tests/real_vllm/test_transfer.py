"""Weights into a real vLLM, and what it then computes. Skipped unless VLLM_BIN names one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from fake_vllm import is_running, until
from launch import environment
from megatron_fspo.rollout.server.flags import ServerOptions
from real_server import FLAGS, Routes, distance, make_checkpoint, proof_of, send, weights
from serving import serving
from test_serve import free_port, started

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.long]

TOLERANCE = 1e-4
FAR = 0.1
NO_CHECKSUMS = ("--worker-extension-cls", "")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        f"{name}{seed}": make_checkpoint(folder / f"{name}{seed}", tied=tied, seed=seed)
        for name, tied in (("tied", True), ("untied", False))
        for seed in (0, 1)
    }


class GlooTrainer:
    """The trainer's end of the backend ``gloo``."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        port, timeout = free_port(), timedelta(seconds=60)
        # Held: the group's workers come to it.
        self._store = dist.TCPStore("127.0.0.1", port, 2, True, timeout, wait_for_workers=False)
        info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        with Call(routes, "/init_weight_transfer_engine", {"init_info": info}) as call:
            self._group = dist.ProcessGroupGloo(self._store, 0, 2, timeout)
        assert call.status == 200, call.answer

    def send(self, tensors: dict[str, Tensor], unsendable: tuple[str, ...] = ()) -> int:
        """Broadcast; returns the route's status. ``unsendable`` are announced as of a type there is not."""
        names = [*tensors, *unsendable]
        info = {
            "names": names,
            "dtype_names": ["float32" if name in tensors else "no_such_type" for name in names],
            "shapes": [list(tensors[name].shape) if name in tensors else [1] for name in names],
        }
        with Call(self._routes, "/update_weights", {"update_info": info}) as call:
            for tensor in tensors.values():
                self._group.broadcast([tensor.contiguous()], dist.BroadcastOptions()).wait()
        return call.status

    def update(self, tensors: dict[str, Tensor], version: str) -> None:
        self._routes.do("/start_weight_update", {})
        assert self.send(tensors) == 200
        self._routes.do("/finish_weight_update", {"weight_version": version})

    def close(self) -> None:
        del self._group, self._store


class Call(threading.Thread):
    """A request under way while the body runs: the worker answers when it has what the body sends."""

    def __init__(self, routes: Routes, path: str, body: dict) -> None:
        super().__init__()
        self._request = routes, path, body

    def run(self) -> None:
        routes, path, body = self._request
        self.status, self.answer = routes.ask(path, body)

    def __enter__(self) -> Call:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.join(120)


@pytest.fixture
def command(checkpoints: dict[str, Path], tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Routes]]:
    """``megatron-fspo serve`` of tied0, ready."""
    port = free_port()
    words = ["--model", str(checkpoints["tied0"]), "--port", str(port), "--log", str(tmp_path / "log")]
    words += ["--dtype", "float32", "--", *FLAGS, *NO_CHECKSUMS]
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_fspo", "serve", *words],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("vLLM is ready at"), (tmp_path / "log").read_text()[
            -3000:
        ]
        yield process, Routes(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def test_gloo_tied_a_failed_update_and_a_crash(
    command: tuple[subprocess.Popen[str], Routes], checkpoints: dict[str, Path]
) -> None:
    process, routes = command
    old, new = checkpoints["tied0"], checkpoints["tied1"]
    assert distance(routes, old) < TOLERANCE
    assert distance(routes, new) > FAR
    assert routes.version == "default"
    trainer = GlooTrainer(routes)
    trainer.update(weights(new), "v1")
    assert distance(routes, new) < TOLERANCE
    assert routes.version == "v1"
    same, text = proof_of(routes, weights(new))
    assert same is None and text.startswith("No checksums of its tensors: `megatron-fspo serve` starts vLLM")
    assert distance(routes, new) < TOLERANCE, "asking does no harm"

    # Of the fused query, key and value one arrives; the layer keeps what it had, and the rest of the session
    # does not stay.
    routes.do("/start_weight_update", {})
    query = "model.layers.0.self_attn.q_proj.weight"
    assert trainer.send({query: weights(old)[query]}, unsendable=("model.norm.weight",)) == 500
    assert distance(routes, new) < TOLERANCE
    assert routes.version == "v1"
    trainer.update(weights(old), "v2")
    assert distance(routes, old) < TOLERANCE

    # Another trainer takes over.
    trainer.close()
    trainer = GlooTrainer(routes)
    trainer.update(weights(new), "v3")
    assert distance(routes, new) < TOLERANCE
    trainer.close()

    family = psutil.Process(process.pid).children(recursive=True)
    (engine,) = [child for child in family if "EngineCore" in child.name()]
    os.kill(engine.pid, signal.SIGKILL)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("vLLM is ready again at")
    assert not any(is_running(child.pid) for child in family)
    assert distance(routes, old) < TOLERANCE, "the checkpoint's"
    assert routes.version == "default"

    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 3
    process.kill()
    until(lambda: not any(is_running(child.pid) for child in family), "the end of all", seconds=30)


def disk_update(routes: Routes, file: Path, version: str) -> None:
    routes.do("/start_weight_update", {})
    routes.do("/update_weights", {"update_info": {"paths": [str(file)]}})
    routes.do("/finish_weight_update", {"weight_version": version})


def test_disk_untied(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    old, new = checkpoints["untied0"], checkpoints["untied1"]
    options = ServerOptions(
        old, port=free_port(), backend="disk", dtype="float32", log=tmp_path / "log", extra=FLAGS
    )
    with started(options) as server:
        routes = Routes(server.url)
        routes.do("/init_weight_transfer_engine", {"init_info": {}})
        assert distance(routes, old) < TOLERANCE
        assert distance(routes, new) > FAR
        disk_update(routes, new / "model.safetensors", "v1")
        assert distance(routes, new) < TOLERANCE
        same, text = proof_of(routes, weights(new))
        assert same is True and text.startswith("The loaded weights agree (25 tensors); ")
        # Only the norms are ones in both.
        same, text = proof_of(routes, weights(old))
        assert same is False and text.startswith("17 of 26 tensors differ; ")

        # A file that ends too soon, and one of bfloat16.
        routes.do("/start_weight_update", {})
        missing = {"update_info": {"paths": [str(tmp_path / "none.safetensors")]}}
        assert routes.ask("/update_weights", missing)[0] == 500
        assert distance(routes, new) < TOLERANCE
        rounded = {name: tensor.bfloat16() for name, tensor in weights(old).items()}
        save_file(rounded, tmp_path / "rounded.safetensors")
        disk_update(routes, tmp_path / "rounded.safetensors", "v2")
        assert TOLERANCE < distance(routes, old) < FAR
        assert routes.version == "v2"


def test_two_workers_in_one_server(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Tensor parallel: each has its shards, and checksums add up to the whole."""
    old, new = checkpoints["untied0"], checkpoints["untied1"]
    with serving(old, tmp_path, "--dtype", "float32", "--", *FLAGS, "--tensor-parallel-size", "2") as (
        server,
    ):
        routes = server.routes
        assert distance(routes, old) < TOLERANCE
        assert send(server.url, weights(new), 1) is None
        assert distance(routes, new) < TOLERANCE
        assert proof_of(routes, weights(new))[0] is True
