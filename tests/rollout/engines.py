"""An engine of one rank, with servers that answer like vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from fake_server import KEY, MAX_TOKENS, VOCAB_SIZE, FakeServer, tokens_of
from torch import Tensor

from megatron_fspo.job.remote import Loop, http_client
from megatron_fspo.parallel.control import Control
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.rollout.client.engine import Leader, Trainer, VLLMEngine
from megatron_fspo.rollout.client.memory_phases import Memory
from megatron_fspo.rollout.client.pool import Pool
from megatron_fspo.rollout.client.send_weights import DiskSender
from megatron_fspo.rollout.client.server import Server
from megatron_fspo.rollout.sampling import stream_seed
from megatron_fspo.types import Completion, Prompt, SamplingParams

PROMPTS = [Prompt(index=i, token_ids=(1, 2), text="", answer="") for i in range(3)]
PARAMS = SamplingParams(n=4, max_tokens=MAX_TOKENS, seed=5)
CANARY = [(1, 2, 3), (4, 5)]


class Weights:
    """A trainer's weights: what is asked of it, counted."""

    def __init__(self) -> None:
        self.gathered = 0
        self.w = torch.ones(2)
        self.asked: Callable[[], object] = lambda: None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        self.gathered += 1
        self.asked()
        yield "w", self.w

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        self.asked()
        return [torch.full((len(ids) - 1,), -1.0) for ids in sequences]


@contextmanager
def running(
    folder: Path,
    count: int = 2,
    control: Control | None = None,
    tolerance: float | None = 1e-4,
    dtype: torch.dtype = torch.float32,
    memory: Memory | None = None,
) -> Iterator[tuple[VLLMEngine, list[FakeServer], Weights]]:
    """An engine, its servers, and the weights that it sends."""
    with ExitStack() as stack:
        servers_loop = stack.enter_context(Loop("rollout"))
        fakes = []
        for _ in range(count):
            fake = FakeServer()
            servers_loop.run(fake.start())
            stack.callback(lambda fake=fake: servers_loop.run(fake.__aexit__()))
            fakes.append(fake)
        http = http_client()
        pool = Pool(
            [Server(fake.url, http, api_key=KEY) for fake in fakes],
            max_in_flight_per_server=8,
            vocab_size=VOCAB_SIZE,
            recovery_seconds=2,
            probe_seconds=0.02,
            attempts=1,
        )
        leader = Leader(loop=Loop("rollout"), http=http, pool=pool, sender=DiskSender(folder))
        weights = Weights()
        world = dist.group.WORLD
        assert world is not None
        engine = VLLMEngine(
            Trainer(tensors=weights.tensors, score=weights.score),
            ParallelGroups(
                **dict.fromkeys(("tp", "pp", "cp", "dp", "dp_cp", "ep", "edp"), world),
                control=control or Control(),
            ),
            leader,
            canary_sequences=CANARY,
            dtype=dtype,
            tolerance=tolerance,
            memory=memory,
        )
        stack.callback(engine.close)
        yield engine, fakes, weights


def check_all(found: list[list[Completion]]) -> None:
    """Four completions of each prompt, each where its request was."""
    want = [[tokens_of(stream_seed(PARAMS.seed, p.index, n)) for n in range(PARAMS.n)] for p in PROMPTS]
    assert [[tuple(completion.token_ids) for completion in row] for row in found] == want


def versions(found: list[list[Completion]]) -> set[int]:
    return {completion.weight_version for row in found for completion in row}
