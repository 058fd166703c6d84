"""Weights from a job of tensor and pipeline parallel ranks to servers of several workers, by broadcast."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import Mock
from weakref import WeakSet

import psutil
import pytest
import torch
import torch.distributed as dist
from fake_nccl import WORKER_SECONDS, Group
from fake_workers import Workers
from safetensors.torch import load_file
from torch import Tensor

from fake_vllm import until
from launch import run_worker
from megatron_fspo.errors import InputError
from megatron_fspo.job.remote import Loop, http_client
from megatron_fspo.parallel.buckets import in_buckets
from megatron_fspo.rollout.client import send_weights as client_weights
from megatron_fspo.rollout.client.send_weights import BroadcastSender
from megatron_fspo.rollout.client.server import Server, ServerLost
from megatron_fspo.rollout.links import Receiver, join_nccl

BUCKET_BYTES = 40_000
TIMEOUT_SECONDS = 4.0
# Workers of each server, and what goes wrong at the last: groups of 2, 3 and 4 ranks.
CASES = [((1,), "raise"), ((2,), "hang"), ((2, 1), "die")]


@pytest.fixture(scope="module")
def checkpoints(random_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Name → folder and dtype: the tied one in bfloat16."""
    from transformers import Qwen3ForCausalLM

    tied = tmp_path_factory.mktemp("bfloat16") / "tied"
    Qwen3ForCausalLM.from_pretrained(random_checkpoints["tied"], dtype=torch.bfloat16).save_pretrained(tied)
    return {"tied": (tied, "bfloat16"), "untied": (random_checkpoints["untied"], "float32")}


@pytest.fixture(scope="module")
def sent(checkpoints: dict, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list]]:
    """What the ranks wrote, and per case (name, servers, result)."""
    out = tmp_path_factory.mktemp("sent")
    with ExitStack() as stack:
        todo, servers = [], []
        for name, (folder, dtype) in checkpoints.items():
            for sizes, fault in CASES[:: 2 if name == "tied" else 1]:
                faults = [*[None] * (len(sizes) - 1), fault]
                group = [
                    stack.enter_context(Workers(size, fault=one))
                    for size, one in zip(sizes, faults, strict=True)
                ]
                urls = [server.url for server in group]
                servers.append((name, fault, group))
                left = urls if fault == "raise" else urls[:-1]
                todo.append({"checkpoint": str(folder), "dtype": dtype, "urls": urls, "left": left})
        words = [str(out), str(BUCKET_BYTES), str(TIMEOUT_SECONDS), json.dumps(todo)]
        run_worker(Path(__file__).with_name("sending_worker.py"), *words, nproc=4, timeout=400)
        results = json.loads((out / "results.json").read_text())
        yield out, [(*server, result) for server, result in zip(servers, results, strict=True)]


def differing(got: dict[str, Tensor], want: dict[str, Tensor]) -> set[str]:
    """Names whose bytes, shape or dtype differ, or that one of both lacks."""
    return {
        name
        for name in got.keys() | want.keys()
        if name not in got
        or name not in want
        or got[name].dtype != want[name].dtype
        or got[name].shape != want[name].shape
        or not torch.equal(got[name].view(torch.uint8), want[name].view(torch.uint8))
    }


@pytest.mark.slow
def test_every_worker_has_the_exported_checkpoint(sent: tuple[Path, list]) -> None:
    out, cases = sent
    exported = {
        (name, version): load_file(out / f"{name}-{version}" / "model.safetensors")
        for name in ("tied", "untied")
        for version in (1, 2)
    }
    assert [name for name, version in exported if "lm_head.weight" in exported[name, version]] == [
        "untied"
    ] * 2
    assert differing(exported["tied", 1], exported["tied", 2]) == exported["tied", 1].keys()
    for name, fault, servers, result in cases:
        assert result["first"]["problem"] is None
        assert result["second"]["problem"] is None
        for server in servers:
            gone = server is servers[-1] and fault != "raise"
            assert list(server.finished) == (["1"] if gone else ["1", "2"]), (name, fault)
            for version, workers in server.finished.items():
                for loaded in workers:
                    assert not differing(loaded, exported[name, int(version)]), (name, fault, version)


@pytest.mark.slow
def test_a_failure_is_reported_in_time(sent: tuple[Path, list]) -> None:
    # Whoever notices first: the worker, its server's end, another worker, or the broadcast here.
    says = ("no room for", "RemoteProtocolError", "Timed out", "Connection closed", "the broadcast of ")
    for name, fault, servers, result in sent[1]:
        failed = result["fault"]
        assert failed["problem"], (name, fault)
        assert any(words in failed["problem"] for words in says), failed
        # A worker that stops for good shows as a broadcast, or an answer, that does not come.
        limit = TIMEOUT_SECONDS + 10 if fault == "hang" else TIMEOUT_SECONDS
        if fault == "die":
            assert servers[-1].url in failed["problem"]
        assert failed["seconds"] < limit + 5, (name, fault)
        assert [route for route, _ in servers[-1].asked].count("/finish_weight_update") in (1, 2)


WEIGHTS = {
    "a": torch.arange(12.0).view(3, 4),
    "b": torch.ones(7, dtype=torch.bfloat16),
    "c": torch.zeros(2, 0),
    "d": torch.arange(6.0).view(2, 3).t(),
}


def exchange(
    kind: str, tensors: Iterable[tuple[str, Tensor]] = WEIGHTS.items()
) -> tuple[str, list[dict[str, Tensor]]]:
    """An update in this process: what the server was asked, but for the port, and what its workers have."""
    with Workers(2) as server, Loop("rollout") as loop:
        http = http_client()
        sender = BroadcastSender(kind, address="127.0.0.1", timeout_seconds=30)
        problem = client_weights.send_weights([Server(server.url, http)], sender, loop, tensors, 5)
        sender.close()
        loop.run(http.aclose())
        assert problem is None
        port = server.asked[2][1]["init_info"]["master_port"]
        return json.dumps(server.asked).replace(str(port), "PORT"), server.finished["5"]


def test_no_more_than_two_buckets_and_a_tensor_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_weights, "in_buckets", partial(in_buckets, bucket_bytes=1000))
    alive: WeakSet[Tensor] = WeakSet()
    peak = 0

    def gathered() -> Iterator[tuple[str, Tensor]]:
        nonlocal peak
        for number in range(40):
            tensor = torch.full((50,), float(number))
            alive.add(tensor)
            # A thread of gloo may have its last tensor for a moment after the broadcast returned.
            until(
                lambda: sum(one.nbytes for one in alive) <= 2 * 1000 + 200,
                "no more than is allowed",
                seconds=5,
            )
            peak = max(peak, sum(one.nbytes for one in alive))
            yield str(number), tensor

    asked, loaded = exchange("gloo", gathered())
    assert peak == 2 * 1000 + 200
    assert asked.count('"/update_weights"') == 1, "a request per bucket"
    assert all([tensor[0].item() for tensor in worker.values()] == list(range(40)) for worker in loaded)


def test_a_worker_has_one_bucket_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_weights, "in_buckets", partial(in_buckets, bucket_bytes=1000))
    receive, held, received = Receiver._receive, dict[int, WeakSet[Tensor]](), []

    def next_message(receiver: Receiver, size: int) -> Tensor:
        # A thread of gloo may have its last tensor for a moment.
        until(lambda: not held.get(id(receiver)), "the end of the bucket before", seconds=5)
        message = receive(receiver, size)
        if size == 1000:
            held.setdefault(id(receiver), WeakSet()).add(message)
        received.append(size)
        return message

    monkeypatch.setattr(Receiver, "_receive", next_message)
    exchange("gloo", ((str(number), torch.ones(250)) for number in range(5)))
    assert len(received) == 2 * (3 * 5 + 1) and received.count(1000) == 2 * 5


def test_a_bucket_that_is_sent_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
        for bucket in in_buckets(tensors, bucket_bytes=48):
            yield from (bucket, bucket)

    monkeypatch.setattr(client_weights, "in_buckets", twice)
    with Workers(2) as server, Loop("rollout") as loop:
        http = http_client()
        sender = BroadcastSender("gloo", address="127.0.0.1", timeout_seconds=30)
        problem = client_weights.send_weights([Server(server.url, http)], sender, loop, WEIGHTS.items(), 1)
        loop.run(http.aclose())
    assert isinstance(problem, ServerLost) and not server.finished
    assert server.url in str(problem) and "a arrived twice" in str(problem)


def test_an_update_that_is_interrupted_lets_the_workers_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no bucket is on its way."""
    monkeypatch.setattr(client_weights, "in_buckets", partial(in_buckets, bucket_bytes=1))
    with Workers(2) as server, Loop("rollout") as loop:
        http = http_client()
        sender = BroadcastSender("gloo", address="127.0.0.1", timeout_seconds=60)
        send = partial(client_weights.send_weights, [Server(server.url, http)], sender, loop)

        def interrupted() -> Iterator[tuple[str, Tensor]]:
            yield from [("a", torch.ones(3)), ("b", torch.ones(3))]
            until(lambda: any("a" in one for one in server._loaded), "the first bucket", seconds=20)
            time.sleep(0.2)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            send(interrupted(), 1)
        began = time.monotonic()
        assert send(WEIGHTS.items(), 2) is None
        assert time.monotonic() - began < 30
        sender.close()
        loop.run(http.aclose())
    assert list(server.finished) == ["2"]


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize(("fault", "limit"), [("raise", 60.0), ("hang", 1.0)])
def test_an_update_that_failed_holds_nothing(
    fault: str, limit: float, delta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even by the traceback of what is returned."""
    monkeypatch.setattr(Group, "made", [])
    monkeypatch.setitem(client_weights.LINKS, "nccl", (Group, torch.device("cpu")))
    monkeypatch.setattr(client_weights, "in_buckets", partial(in_buckets, bucket_bytes=400))
    alive: WeakSet[Tensor] = WeakSet()

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in "abcd":
            tensor = torch.rand(50)
            alive.add(tensor)
            yield name, tensor

    with Workers(1, Group, fault=fault) as server, Loop("rollout") as loop:
        http = http_client()
        sender = BroadcastSender("nccl", address="127.0.0.1", timeout_seconds=limit, delta=delta)
        send = partial(client_weights.send_weights, [Server(server.url, http)], sender, loop)
        assert send(tensors(), 1) is None
        problem = send(tensors(), 2)
        assert isinstance(problem, ServerLost)
        for group in Group.made:
            group.queued.clear()
        until(lambda: not alive, "the end of all tensors", seconds=5)
        sender.close()
        loop.run(http.aclose())


def test_nccl_sends_as_gloo_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the NCCL link put on gloo and the CPU, nothing is left that differs."""
    join, device = client_weights.LINKS["gloo"]
    joins = Mock(side_effect=join)
    monkeypatch.setitem(client_weights.LINKS, "nccl", (joins, device))
    (asked, loaded), (asked_by_nccl, loaded_by_nccl) = exchange("gloo"), exchange("nccl")
    ((_, *joined),) = (call.args for call in joins.mock_calls)
    assert joined == [0, 3, timedelta(seconds=30), "127.0.0.1"]
    assert device == torch.device("cpu") and asked == asked_by_nccl
    for worker in [*loaded, *loaded_by_nccl]:
        assert not differing(worker, {name: tensor.contiguous() for name, tensor in WEIGHTS.items()})


@pytest.mark.parametrize(("variable", "other"), [(None, "2.29.7"), ("0", "2.29.7"), (None, "2.29.3")])
def test_the_nccl_group(variable: str | None, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made without torch's watchdog, and connected; for members of other versions, not at all."""
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    if variable is not None:
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", variable)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    group = Mock(side_effect=lambda *_: seen.append(os.environ["TORCH_NCCL_BLOCKING_WAIT"]) or made)
    made, seen, store = Mock(), [], dist.HashStore()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", group, raising=False)
    for rank in (0, 2):
        store.set(f"nccl/{rank}", other)
    if other != "2.29.7":
        with pytest.raises(InputError, match=r"NCCL 2\.29\.7 here, and 2\.29\.3 "):
            join_nccl(store, 1, 3, timedelta(seconds=9), "10.0.0.5")
        assert not seen
        return
    assert join_nccl(store, 1, 3, timedelta(seconds=9), "10.0.0.5") is made
    group.assert_called_once_with(store, 1, 3, group.Options.return_value)
    assert group.Options.return_value._timeout == timedelta(seconds=9)
    assert seen == ["1"] and os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    made.eager_connect_single_device.assert_called_once_with(torch.device("cuda", 3))


def test_nccl_does_not_wait_for_a_member_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    with pytest.raises(RuntimeError, match="timeout"):
        join_nccl(dist.HashStore(), 0, 2, timedelta(seconds=0.1), "10.0.0.5")


@pytest.mark.parametrize(("fault", "limit"), [("die", 60.0), ("leave", 60.0), ("hang", 1.0)])
def test_a_worker_that_is_lost_in_an_nccl_broadcast(
    fault: str, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL waits for it for ever, on the GPU: the stream of the trainer has to be free again, and the others
    have to be served, whether its server tells of the end or not."""
    monkeypatch.setattr(Group, "made", [])
    monkeypatch.setitem(client_weights.LINKS, "nccl", (Group, torch.device("cpu")))
    monkeypatch.setattr(client_weights, "in_buckets", partial(in_buckets, bucket_bytes=48))

    def tensors(version: int) -> Iterator[tuple[str, Tensor]]:
        for number in range(6):
            trainer = [group for group in Group.made if group.rank == 0]
            assert all(group.synchronize(5) for group in trainer), "the stream hangs"
            yield str(number), torch.full((6,), float(version * number))

    with Workers(2, Group) as stays, Workers(2, Group, fault=fault) as goes, Loop("rollout") as loop:
        http = http_client()
        servers = [Server(server.url, http) for server in (stays, goes)]
        sender = BroadcastSender("nccl", address="127.0.0.1", timeout_seconds=limit)

        def send(version: int, servers: list[Server]) -> Exception | None:
            return client_weights.send_weights(servers, sender, loop, tensors(version), version)

        assert send(1, servers) is None
        began = time.monotonic()
        problem = send(2, servers)
        assert isinstance(problem, ServerLost)
        assert time.monotonic() - began < WORKER_SECONDS, "it was not the sender who noticed"
        assert fault == "hang" or goes.url in str(problem)
        assert send(3, servers[:1]) is None
        sender.close()
        loop.run(http.aclose())
    assert list(stays.finished) == ["1", "3"] and list(goes.finished) == ["1"]
    for version, workers in stays.finished.items():
        want = {name: tensor.clone() for name, tensor in tensors(int(version))}
        assert not any(differing(worker, want) for worker in workers)
    assert len({group.port for group in Group.made}) == 2
    assert all(group.aborted for group in Group.made if group.rank == 0)


def test_a_group_is_kept_while_its_servers_are_the_same() -> None:
    with Workers(2) as one, Workers(1) as other, Loop("rollout") as loop:
        http = http_client()
        both = [Server(server.url, http) for server in (one, other)]
        sender = BroadcastSender("gloo", address="127.0.0.1", timeout_seconds=30)

        def send(version: int, servers: list[Server]) -> None:
            tensors = {"a": torch.full((5,), float(version))}
            assert client_weights.send_weights(servers, sender, loop, tensors.items(), version) is None
            for server in (one, other)[: len(servers)]:
                assert not any(differing(worker, tensors) for worker in server.finished[str(version)])

        def joined() -> list[int]:
            """Ports of the groups that the first server has joined, and the others are made of."""
            infos = [info["init_info"] for route, info in one.asked if route.startswith("/init")]
            return [info["master_port"] for info in infos if not info.get("joined")]

        for version in (1, 2, 3):
            send(version, both)
        assert len(joined()) == 1
        other.restart()
        send(4, both)
        send(5, both)
        assert len(joined()) == 2
        send(6, both[:1])
        send(7, both)
        assert len(joined()) == len({*joined()}) == 4
        with Loop("rollout") as another:  # another trainer
            rival = BroadcastSender("gloo", address="127.0.0.1", timeout_seconds=30)
            another.run(rival.connect([Server(one.url, http)]))
            send(8, both)
            rival.close()
        assert len(joined()) == 6
        sender.close()
        loop.run(http.aclose())


def test_a_group_listens_on_its_address_only() -> None:
    """Who reaches its ports could take part in it."""
    address = "127.0.0.5"
    before = listening()
    with Workers(2) as server, Loop("rollout") as loop:
        http = http_client()
        sender = BroadcastSender("gloo", address=address, timeout_seconds=30)
        loop.run(sender.connect([Server(server.url, http)]))
        opened = listening() - before - {("127.0.0.1", int(server.url.rsplit(":")[-1]))}
        sender.close()
        loop.run(http.aclose())
    # The store, and three ranks: the workers' own address is the one on the way to the trainer.
    assert {ip for ip, _ in opened} <= {address, "127.0.0.1"}
    assert len(opened) == 4
    (_, init), *_ = (asked for asked in server.asked if asked[0] == "/init_weight_transfer_engine")
    assert (address, init["init_info"]["master_port"]) in opened


def listening() -> set[tuple[str, int]]:
    """Addresses and ports at which this process can be reached."""
    connections = psutil.Process().net_connections("inet")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}
