"""Updates that send what changed: the messages, and an engine whose servers fail, round, or lose some."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from fake_server import VOCAB_SIZE
from fake_workers import Sent, Workers
from torch import Tensor

from megatron_fspo.config import VLLM
from megatron_fspo.job.remote import Loop, http_client
from megatron_fspo.parallel.buckets import in_buckets
from megatron_fspo.parallel.control import Control
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.rollout import delta
from megatron_fspo.rollout.client import send_weights as client_weights
from megatron_fspo.rollout.client.engine import Leader, Trainer, VLLMEngine
from megatron_fspo.rollout.client.pool import Pool
from megatron_fspo.rollout.client.proof import WrongWeights
from megatron_fspo.rollout.client.send_weights import BroadcastSender
from megatron_fspo.rollout.client.server import Server
from megatron_fspo.rollout.delta import Changes, Held

pytestmark = pytest.mark.usefixtures("one_rank", "short_waits")
SIZES = [(), (0, 3), (7,), (3, 5), (2**16,), (2**16 + 1,), (5, 70_001)]
SHARES = [0.0, 1e-4, 0.02, 0.3, 0.49, 0.6, 1.0]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_weights, "in_buckets", partial(in_buckets, bucket_bytes=1))


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def drawn(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Any bits: also infinities, numbers that are none, with whatever they carry, and both zeros."""
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(256, (count,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_decoded_is_what_was_encoded_bit_for_bit(
    seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over updates in which other shares of other tensors change; a message never has more bytes."""
    monkeypatch.setattr(delta, "_CHUNK", 2 * delta._BLOCK)
    generator = torch.Generator().manual_seed(seed)
    tensors = {str(shape): drawn(shape, dtype, generator) for shape in SIZES}
    changes, held, shorter = Changes(), Held(), 0
    for update in range(6):
        # A matrix by columns, as a transposed one is.
        columns = (
            tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for tensor in tensors.values()
        )
        sent = list(changes.encode(zip(tensors, columns, strict=True)))
        decoded = dict(held.decode((name, tensor.clone()) for name, tensor in sent))
        assert list(decoded) == list(tensors)
        for (label, message), (name, tensor) in zip(sent, tensors.items(), strict=True):
            assert (decoded[name].dtype, decoded[name].shape) == (dtype, tensor.shape)
            assert torch.equal(bits(decoded[name]), bits(tensor)), (name, update)
            assert (label == name) == (message.nbytes == tensor.nbytes) and message.nbytes <= tensor.nbytes
            shorter += label != name
        for place, (name, tensor) in enumerate(tensors.items()):
            share = SHARES[(place + update + seed) % len(SHARES)]
            changed = torch.rand(tensor.shape, generator=generator) < share
            tensors[name] = torch.where(changed, drawn(tensor.shape, dtype, generator), tensor)
    assert shorter > 8


def test_bytes_of_a_message() -> None:
    """4 per word that changed and 4 per block of 65,536 words; none for a tensor as it was; whole beyond."""
    changes, weight = Changes(), torch.ones(3 * 2**16, dtype=torch.bfloat16)

    def sent() -> int:
        ((_, message),) = changes.encode([("w", torch.nn.Parameter(weight))])  # the trainer's own memory
        assert not message.requires_grad
        return message.nbytes

    assert [sent(), sent()] == [weight.nbytes, 0]
    weight[[0, 2**16 - 1, 2**16, -1]] = 2.0
    assert [sent(), sent()] == [4 * 4 + 3 * 4, 0]
    weight[: weight.numel() // 2] = 3.0
    assert sent() == weight.nbytes
    weight[0], weight[1], weight[2] = -0.0, float("nan"), 0.0
    assert sent() == 3 * 4 + 3 * 4
    weight[0] = 0.0
    assert [sent(), sent()] == [4 + 3 * 4, 0]


def test_a_message_may_come_twice_and_not_before_its_tensor() -> None:
    changes, held = Changes(), Held()
    old, new = torch.zeros(9), torch.zeros(9)
    new[3] = 1.0
    first, second = (list(changes.encode([("w", tensor)])) for tensor in (old, new))
    for sent in (first, second, second):
        ((_, decoded),) = held.decode(sent)
    assert torch.equal(decoded, new)
    with pytest.raises(KeyError):
        list(Held().decode(second))


def test_no_files_of_changes() -> None:
    with pytest.raises(ValueError, match="delta = true needs"):
        VLLM(transfer="disk", folder="weights", delta=True)


@dataclass
class Job:
    """A trainer, its engine and what its servers' workers have."""

    weights: dict[str, Tensor]
    engine: VLLMEngine
    servers: Sequence[Workers]

    def update(self, version: int) -> int:
        """Bytes that were sent to workers, which then have the weights, as far as they can hold them."""
        self.engine.update_weights(version)
        for server in self.servers:
            for worker in server.finished[str(version)]:
                assert worker.keys() == self.weights.keys()
                for name, tensor in self.weights.items():
                    served = tensor.to(server.served or tensor.dtype)
                    assert torch.equal(bits(worker[name]), bits(served)), (name, version)
        assert self.engine.metrics()["rollout/weights_proven"] == 1
        return int(self.engine.metrics()["rollout/sent_bytes"])

    def move(self, count: int) -> None:
        """The first elements, by more than any dtype rounds."""
        for name, tensor in self.weights.items():
            self.weights[name] = tensor.clone()
            self.weights[name].view(-1)[:count] += 1.0


@contextmanager
def job(dtype: torch.dtype, *servers: Workers) -> Iterator[Job]:
    """Three matrices, each in a bucket of its own."""
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.rand(40, 25, generator=generator).to(dtype) for name in "abc"}
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(server)
        http, world = http_client(), dist.group.WORLD
        pool = Pool(
            [Server(one.url, http) for one in servers], max_in_flight_per_server=8, vocab_size=VOCAB_SIZE
        )
        engine = VLLMEngine(
            Trainer(
                tensors=lambda: iter(weights.items()),
                score=lambda rows: [torch.full((len(ids) - 1,), -1.0) for ids in rows],
            ),
            ParallelGroups(
                **dict.fromkeys(("tp", "pp", "cp", "dp", "dp_cp", "ep", "edp"), world), control=Control()
            ),
            Leader(
                loop=Loop("rollout"),
                http=http,
                pool=pool,
                sender=BroadcastSender("gloo", address="127.0.0.1", timeout_seconds=30, delta=True),
            ),
            canary_sequences=[(1, 2, 3)],
            dtype=dtype,
            tolerance=1e-4,
        )
        stack.callback(engine.close)
        yield Job(weights, engine, servers)


def test_three_updates_and_a_group_that_breaks() -> None:
    """What a broken update had sent is forgotten: the next one brings everything, to all."""
    with job(torch.bfloat16, Workers(2), Workers(1, fault="raise")) as run:
        whole = 3 * 2000
        assert run.update(1) == whole
        run.move(10)
        assert run.update(2) == whole  # one worker has no room, once; so each server alone
        assert run.update(2) == whole  # both again
        run.move(10)
        assert run.update(3) == 3 * (4 * 10 + 4)
        assert run.update(4) == 0
        run.servers[1].restart()
        run.move(10)
        assert run.update(5) == whole
        run.move(400)
        assert run.update(6) == 3 * (4 * 400 + 4)
        # A server that comes back while others sample is updated alone.
        (server,) = run.engine.leader.loop.run(run.engine.leader.pool.reachable())[1:]
        assert run.engine._update([server]) is None
        assert run.engine.metrics()["rollout/sent_bytes"] == whole
        assert run.update(7) == whole
        assert run.update(8) == 0


def test_a_bucket_is_gathered_while_the_one_before_is_sent() -> None:
    """And where gathering fails, that one is not waited for; the next update brings what did not arrive."""
    go_on = threading.Event()

    def decode(held: Held, sent: Sent) -> Sent:
        if not go_on.wait(5):
            raise RuntimeError("waited in vain")
        return held.decode(sent)

    def tensors(version: int, fails: bool = False) -> Iterator[tuple[str, Tensor]]:
        for name in "abcd":
            if name == "c":
                if fails:
                    raise ValueError
                go_on.set()
            yield name, torch.full((5,), float(version))

    with Workers(1) as worker, Loop("rollout") as loop:
        worker.decode = decode
        http = http_client()
        sender = BroadcastSender("gloo", address="127.0.0.1", timeout_seconds=30, delta=True)
        send = partial(client_weights.send_weights, [Server(worker.url, http)], sender, loop)
        assert send(tensors(1), 1) is None
        go_on.clear()
        with pytest.raises(ValueError):
            send(tensors(2, fails=True), 2)
        assert not go_on.is_set()
        assert send(tensors(3), 3) is None
        sender.close()
        loop.run(http.aclose())
    assert list(worker.finished) == ["1", "3"]
    assert all(tensor.eq(3.0).all() for tensor in worker.finished["3"][0].values())


@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_a_message_that_is_lost_is_seen_and_one_that_comes_twice_is_harmless(lost: str) -> None:
    def twice(held: Held, sent: Sent) -> Sent:
        return dict(held.decode(one for one in sent for _ in range(2))).items()

    def without(held: Held, sent: Sent) -> Sent:
        """Nothing in place of what changed in one tensor."""
        return held.decode((name, one[:0] if name.startswith(lost) else one) for name, one in sent)

    with job(torch.bfloat16, Workers(1), Workers(2)) as run:
        assert run.update(1) == 3 * 2000
        run.servers[1].decode = twice
        run.move(1)
        assert run.update(2) == 3 * 8
        run.servers[1].decode = without
        run.move(1)
        with pytest.raises(WrongWeights, match=rf"{run.servers[1].url} .* version 3: 1 of 3 tensors"):
            run.engine.update_weights(3)


@pytest.mark.parametrize("other", [torch.bfloat16, torch.float32])
def test_what_servers_round_away_is_not_sent(other: torch.dtype) -> None:
    """From the second update on, where all have the same dtype."""
    with job(torch.float32, Workers(1, served=torch.bfloat16), Workers(1, served=other)) as run:
        assert run.update(1) == 3 * 4000
        want = 0
        for name, tensor in run.weights.items():
            run.weights[name] = tensor + 1e-4
            moved = int((tensor.bfloat16() != run.weights[name].bfloat16()).sum())
            assert 0 < moved < 200
            want += 4 * moved + 4
        assert run.update(2) == (want if other is torch.bfloat16 else 3 * 4000)
