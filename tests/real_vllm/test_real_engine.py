"""Two servers behind the engine, one of which stands still in the middle of an update, or is killed."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen3ForCausalLM

from fake_vllm import until
from megatron_fspo.job.remote import Loop, http_client
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.rollout.client import weights as client_weights
from megatron_fspo.rollout.client.engine import Leader, Trainer, VLLMEngine
from megatron_fspo.rollout.client.pool import Pool
from megatron_fspo.rollout.client.proof import canary_sequences
from megatron_fspo.rollout.client.server import Server
from megatron_fspo.rollout.client.turns import Memory
from megatron_fspo.rollout.client.weights import BroadcastSender, in_buckets
from megatron_fspo.rollout.common import api_key
from megatron_fspo.types import Completion, Prompt, SamplingParams
from real_server import distance, random_like, weights
from serving import Served

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TOLERANCE = 1e-4
FAR = 0.1
VOCAB_SIZE = 14
PROMPTS = [Prompt(index=i, token_ids=(i, 3, 13 - i, 7), text="", answer="") for i in range(12)]
TOKENS = 100
TIMEOUT, STANDSTILL = 5, 12  # seconds


class Model:
    """A trainer whose weights are a checkpoint's."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.on_tensor: Callable[[], None] = lambda: None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights(self.checkpoint).items():
            yield name, tensor
            self.on_tensor()

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        model = _read(self.checkpoint)
        scores = []
        for ids in sequences:
            log_probs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            scores.append(log_probs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0])
        return scores


@cache
def _read(checkpoint: Path) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


class Job:
    """The production engine on one rank."""

    def __init__(self, model: Model, servers: Sequence[Served], memory: Memory | None = None) -> None:
        http = http_client()
        self.pool = Pool(
            [Server(server.url, http, api_key=api_key()) for server in servers],
            max_in_flight_per_server=8,
            vocab_size=VOCAB_SIZE,
            probe_seconds=0.5,
        )
        world = dist.group.WORLD
        assert world is not None
        sender = BroadcastSender("gloo", address="127.0.0.1", timeout_seconds=TIMEOUT)
        self.engine = VLLMEngine(
            Trainer(tensors=model.tensors, score=model.score),
            ParallelGroups(tp=world, pp=world, cp=world, ep=world, dp=world, dp_cp=world),
            Leader(loop=Loop("rollout"), http=http, pool=self.pool, sender=sender),
            canary_sequences=canary_sequences(VOCAB_SIZE, 128),
            dtype=torch.float32,
            tolerance=TOLERANCE,
            memory=memory,
        )

    def generate(
        self,
        tokens: int,
        meanwhile: Callable[[], None] = lambda: None,
        *,
        samples: int = 4,
        stop: tuple[int, ...] = (),
    ) -> list[list[Completion]]:
        """Some completions of every prompt, each counted once."""
        done: list[int] = []
        params = SamplingParams(n=samples, max_tokens=tokens, seed=3, stop_token_ids=stop)
        pending = self.engine.submit(PROMPTS, params)
        meanwhile()
        completions = pending(done.append)
        assert sum(done) == samples * len(PROMPTS)
        assert [len(row) for row in completions] == [samples] * len(PROMPTS)
        return completions

    @property
    def live(self) -> list[str]:
        return [server.url for server in self.pool.live()]


@pytest.fixture(scope="module")
def checkpoints(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return [random_like(checkpoint, folder / str(seed), seed=seed) for seed in (0, 1)]


@pytest.fixture
def model(checkpoints: list[Path], tmp_path: Path) -> Iterator[Model]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield Model(checkpoints[0])
    dist.destroy_process_group()


class Asker:
    """Asks servers for scores all the time; each answer has to be of one version as a whole."""

    def __init__(self, servers: Sequence[Served], checkpoints: Sequence[Path]) -> None:
        self._versions = [Model(checkpoint).score([PROMPT])[0] for checkpoint in checkpoints]
        self.errors: dict[str, list[list[float]]] = {server.url: [] for server in servers}
        """Per server and answer, the distance to each checkpoint."""
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(server,)) for server in servers]

    def _ask(self, served: Served) -> None:
        async def main() -> None:
            async with http_client() as http:
                server = Server(served.url, http, api_key=api_key())
                while not self._end.is_set():
                    got = torch.tensor(await server.score(PROMPT, timeout=300))
                    distances = [(got - want).abs().max().item() for want in self._versions]
                    self.errors[served.url].append(distances)
                    await asyncio.sleep(0.05)

        asyncio.run(main())

    def __enter__(self) -> Asker:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()


PROMPT = canary_sequences(VOCAB_SIZE, 128)[0]


def test_one_stands_still_in_the_middle_of_an_update(
    model: Model, pair: list[Served], checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than the sender waits. The other goes on; what answers has one version as a whole."""
    goes_on, stops = pair
    old, new = checkpoints
    monkeypatch.setattr(client_weights, "in_buckets", partial(in_buckets, bucket_bytes=2**15))
    job = Job(model, pair)
    model.checkpoint = new
    job.engine.update_weights(1)
    assert len(job.live) == 2
    core = stops.engine
    left = iter(range(10))
    stopped = []

    def stop() -> None:
        if next(left, None) is None and not stopped:
            core.send_signal(signal.SIGSTOP)
            stopped.append(time.monotonic())
            threading.Timer(STANDSTILL, core.send_signal, (signal.SIGCONT,)).start()

    model.checkpoint, model.on_tensor = old, stop
    with Asker(pair, checkpoints) as asker:
        until(lambda: all(asker.errors.values()), "answers of both")
        job.engine.update_weights(2)
        took = time.monotonic() - stopped[0]
        assert goes_on.url in job.live
        in_rotation = stops.url in job.live
        until(lambda: time.monotonic() - stopped[0] > STANDSTILL + 1, "the end of the standstill")
        completions = job.generate(20)
        until(lambda: job.generate(20) and len(job.live) == 2, "the way back", seconds=120)
        count = {url: len(errors) for url, errors in asker.errors.items()}
        until(lambda: all(len(errors) > count[url] for url, errors in asker.errors.items()), "more answers")
    print(f"the update took {took:.1f} s; in rotation after it: {in_rotation}")
    assert took > TIMEOUT, "no standstill, no test"
    assert {completion.weight_version for row in completions for completion in row} == {2}
    for server in pair:
        errors = asker.errors[server.url]
        assert all(min(distances) < TOLERANCE for distances in errors), "a mixture answered"
        assert errors[0][1] < TOLERANCE < FAR < errors[0][0]
        assert errors[-1][0] < TOLERANCE < FAR < errors[-1][1]
        assert server.routes.version == "2"
        assert distance(server.routes, old) < TOLERANCE
    job.engine.close()


def test_responses_that_updates_meet_go_on_with_the_new_weights(
    model: Model, pair: list[Served], checkpoints: list[Path]
) -> None:
    """Every token has the log-prob that its version gives it after the whole of what came before: also the
    cache of what the old weights had read is new."""
    job = Job(model, pair)
    of_version = {20 + i: checkpoints[i % 2] for i in range(4)}

    def update(version: int) -> None:
        model.checkpoint = of_version[version]
        job.engine.update_weights(version)

    def updates() -> None:
        tokens = [server.count("generation_tokens") for server in pair]
        until(
            lambda: all(
                server.count("generation_tokens") > before + 20
                for server, before in zip(pair, tokens, strict=True)
            ),
            "some tokens",
        )
        for version in (21, 22, 23):
            update(version)

    update(20)
    # So many that no update comes too late, however slowly a busy server tells its metrics; and of different
    # lengths: else all that a server has at once would end together, and an update could fall between them.
    rows = job.generate(120, updates, samples=20, stop=(5,))
    found = [completion for row in rows for completion in row]
    assert len({len(completion.token_ids) for completion in found}) > 10
    assert any(len(completion.version_spans) > 1 for completion in found), "some were met half-way"
    sequences = [
        (*prompt.token_ids, *c.token_ids) for prompt, row in zip(PROMPTS, rows, strict=True) for c in row
    ]
    scores = {version: Model(of_version[version]).score(sequences) for version in (20, 21)}
    worst = 0.0
    for number, completion in enumerate(found):
        sampled = torch.tensor(completion.log_probs)
        for span in completion.version_spans:
            mine = scores[20 + span.version % 2][number][-len(sampled) :]
            worst = max(worst, (sampled - mine)[span.start : span.end].abs().max().item())
    assert worst < TOLERANCE
    job.engine.close()


def texts(completions: list[list[Completion]]) -> list[tuple[int, ...]]:
    return [tuple(completion.token_ids) for row in completions for completion in row]


def test_one_is_killed_in_the_middle_of_a_batch(
    model: Model, pair: list[Served], checkpoints: list[Path]
) -> None:
    stays, dies = pair
    old, new = checkpoints
    job = Job(model, pair)
    model.checkpoint = new
    job.engine.update_weights(1)
    assert job.live == [stays.url, dies.url]
    for server in pair:
        assert server.routes.version == "1"
        assert distance(server.routes, new) < TOLERANCE < FAR < distance(server.routes, old)
    undisturbed = job.generate(TOKENS)
    assert len(set(texts(undisturbed))) == 4 * len(PROMPTS), "every request has a random stream of its own"
    assert stays.answered > 0 < dies.answered

    def kill() -> None:
        until(lambda: dies.open > 0, "requests under way")
        dies.engine.send_signal(signal.SIGKILL)

    disturbed = job.generate(TOKENS, kill)
    assert job.live == [stays.url]
    assert texts(disturbed) == texts(undisturbed), "each request was answered, once, as it would have been"
    assert {completion.weight_version for row in disturbed for completion in row} == {1}
    job.engine.close()


class Lender:
    def hold(self, *, weights: bool, rest: bool) -> None:
        self.holds = (weights, rest)


def test_what_sleeping_servers_were_asked_goes_on_when_they_wake(model: Model, pair: list[Served]) -> None:
    """No memory moves: vLLM on a CPU has the routes, and its engine obeys, but its workers ignore them."""
    memory = Lender()
    job = Job(model, pair, memory)
    job.engine.update_weights(1)
    assert memory.holds == (False, False)
    arrived: list[int] = []
    params = SamplingParams(n=4, max_tokens=TOKENS, seed=3)
    pending = job.engine.submit(PROMPTS, params, None, lambda number, _: arrived.append(number))
    until(lambda: arrived, "the first response")
    job.engine.rest()
    assert memory.holds == (True, True)
    asleep = len(arrived)
    assert asleep < 48, "nothing was under way"
    assert all(server.routes.ask("/is_sleeping") == (200, {"is_sleeping": True}) for server in pair)
    time.sleep(1.0)
    assert len(arrived) <= asleep + 2, "it sampled in its sleep"  # answers that were on their way
    assert [len(row) for row in job.engine.submit(PROMPTS[:1], params)()] == [4]
    assert memory.holds == (False, False)
    rows = pending()
    assert sorted(arrived) == list(range(48))
    for prompt, row in zip(PROMPTS, rows, strict=True):
        for completion in row:
            assert len(completion.token_ids) == TOKENS
            assert completion.weight_version == 1
            want = model.score([prompt.token_ids + tuple(completion.token_ids)])[0][-TOKENS:]
            assert (torch.tensor(completion.log_probs) - want).abs().max() <= TOLERANCE
    job.engine.rest()
    job.engine.update_weights(2)
    assert {server.version for server in map(lambda one: one.routes, pair)} == {"2"}
    assert len(job.live) == 2
