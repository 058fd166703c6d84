"""What a stranger who reaches a job's ports can do: not run code, and with anything but the store's own
protocol not end it either."""

from __future__ import annotations

import base64
import os
import pickle
import random
import socket
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousStateError

from launch import REPO, environment
from megatron_fspo.cli.rendezvous import BACKEND, _Backend, meet
from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.rollout.links import host_store


class Command:
    """Runs a command where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def parameters(endpoint: str, nodes: int = 1, **more: str) -> RendezvousParameters:
    return RendezvousParameters(BACKEND, endpoint, "job", nodes, nodes, **more)


@pytest.fixture(autouse=True)
def no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``meet`` sets ends with the test: later ones would start nodes with it."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "to be restored to none")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")


def test_states_of_nodes_are_read_and_nothing_else(tmp_path: Path) -> None:
    handler = meet(parameters("127.0.0.1:0"))
    info = handler.next_rendezvous()  # it reads the state that it has written
    assert (info.rank, info.world_size, info.bootstrap_store_info.master_addr) == (0, 1, "127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert handler.shutdown()

    backend = _Backend(HashStore(), "job")
    for number, thing in enumerate((Command(tmp_path / "mark"), subprocess.Popen, eval)):
        backend._store.set(backend._key, base64.b64encode(pickle.dumps(thing, number + 2)))
        with pytest.raises(RendezvousStateError, match="not a state"):
            backend.get_state()
    assert not (tmp_path / "mark").exists()


def test_node_0_listens_at_its_address_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(TrainingError, match="in use"):
            meet(parameters(f"127.0.0.1:{taken.getsockname()[1]}", 2, is_host="true"))
    with pytest.raises(TrainingError, match="cannot listen"):  # exit status 1: it may pass
        meet(parameters("192.0.2.1:0", 2, is_host="true"))
    name = "here.example"
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", ("127.0.1.1", 0))]
    )
    with pytest.raises(InputError, match=f"{name} is 127.0.1.1"):
        meet(parameters(f"{name}:0", 2, is_host="true"))


def test_a_store_is_on_one_address() -> None:
    store = host_store("127.0.0.2", timeout=timedelta(seconds=5))
    assert TCPStore("127.0.0.2", store.port, timeout=timedelta(seconds=5)).num_keys() == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", store.port), 5)


@pytest.mark.slow
def test_strangers_at_every_port_of_a_job(tmp_path: Path) -> None:
    mark, sizes = tmp_path / "mark", "--rollout.prompts 4 --rollout.samples 4 --rollout.max_response_tokens 8"
    words = [sys.executable, "-m", "megatron_fspo", "train", "--config", "examples/make_sum/run.toml"]
    words += ["--nproc", "2", "--model.backend", "cpu", "--run.folder", str(tmp_path), "--run.name", "job"]
    words += [
        *sizes.split(),
        "--run.steps",
        "30",
        "--reward.max_zero_variance_steps",
        "0",
        "--loss.calibrate",
        "0",
        "--evaluation.every",
        "0",
    ]
    words += ["--checkpoint.every", "1000", "--log.wandb", "off"]
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(words, cwd=REPO, env=environment(), stdout=log, stderr=log)
    open_connections = []
    try:
        metrics = tmp_path / "job/metrics.jsonl"
        end = time.monotonic() + 90
        while not (metrics.is_file() and metrics.read_text().count("\n") > 2):
            assert time.monotonic() < end and job.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)
        launcher = psutil.Process(job.pid)
        listening = {
            (process.pid, one.laddr)
            for process in (launcher, *launcher.children(recursive=True))
            for one in process.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN
        }
        assert {address.ip for _, address in listening} == {"127.0.0.1"} and len(listening) > 4
        evil = pickle.dumps(Command(mark))
        noise = random.Random(0).randbytes(70_000)
        for pid, address in sorted(listening):
            for said in (b"", evil, base64.b64encode(evil), b"GET / HTTP/1.1\r\n\r\n", noise, b"\0" * 9):
                connection = socket.create_connection(address, 5)
                open_connections.append(connection)
                connection.settimeout(1)
                with suppress(OSError):  # it hangs up
                    connection.sendall(said)
            if pid == launcher.pid:
                stranger = TCPStore(*address, timeout=timedelta(seconds=5))
                known = stranger.list_keys()
                assert len(known) > 0
                for key in ("torch.rendezvous.job", "failed", "anything"):
                    stranger.set(key, base64.b64encode(evil))
        steps = metrics.read_text().count("\n")
        assert steps < 30, "the job was over before anyone came"
        assert job.wait(120) == 0, (tmp_path / "log").read_text()
        assert metrics.read_text().count("\n") == 30 and not mark.exists()
    finally:
        for connection in open_connections:
            connection.close()
        with suppress(psutil.NoSuchProcess):
            for process in (job, *psutil.Process(job.pid).children(recursive=True)):
                process.kill()
