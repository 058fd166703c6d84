"""The production engine on one rank, for servers of real vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.job.remote import Loop, http_client
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.rollout.client.engine import Leader, Trainer, VLLMEngine
from megatron_fspo.rollout.client.pool import Pool
from megatron_fspo.rollout.client.proof import canary_sequences
from megatron_fspo.rollout.client.send_weights import BroadcastSender
from megatron_fspo.rollout.client.server import Server
from megatron_fspo.rollout.common import api_key
from megatron_fspo.types import Completion, Prompt, SamplingParams
from real_server import TOLERANCE, scores, weights
from serving import Served

VOCAB_SIZE = 14
PROMPTS = [Prompt(index=i, token_ids=(i, 3, 13 - i, 7), text="", answer="") for i in range(12)]
TIMEOUT = 5  # seconds

Rows = list[tuple[Prompt, list[Completion]]]


class Job:
    """The production engine on one rank, whose weights are a checkpoint's."""

    def __init__(
        self,
        servers: Sequence[Served],
        checkpoint: Path,
        *,
        delta: bool = False,
        base: Callable[[], Iterator[tuple[str, Tensor]]] | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.on_tensor: Callable[[], None] = lambda: None
        http = http_client()
        self.loop = Loop("rollout")
        self.pool = Pool(
            [Server(server.url, http, api_key=api_key()) for server in servers],
            max_in_flight_per_server=8,
            vocab_size=VOCAB_SIZE,
            probe_seconds=0.5,
        )
        world = dist.group.WORLD
        assert world is not None
        self.sender = BroadcastSender("gloo", address="127.0.0.1", timeout_seconds=TIMEOUT, delta=delta)
        self.engine = VLLMEngine(
            Trainer(
                tensors=self.tensors,
                base=base,
                score=lambda ids: [scores(self.checkpoint, row) for row in ids],
            ),
            ParallelGroups(tp=world, pp=world, cp=world, ep=world, edp=world, dp=world, dp_cp=world),
            Leader(loop=self.loop, http=http, pool=self.pool, sender=self.sender),
            canary_sequences=canary_sequences(VOCAB_SIZE, 128),
            dtype=torch.float32,
            tolerance=TOLERANCE,
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights(self.checkpoint).items():
            yield name, tensor
            self.on_tensor()

    def generate(self, params: SamplingParams, meanwhile: Callable[[], None] = lambda: None) -> Rows:
        """Some completions of every prompt, each counted once."""
        done: list[int] = []
        pending = self.engine.submit(PROMPTS, params)
        meanwhile()
        rows = pending(done.append)
        assert sum(done) == params.n * len(PROMPTS)
        assert [len(row) for row in rows] == [params.n] * len(PROMPTS)
        return list(zip(PROMPTS, rows, strict=True))

    @property
    def live(self) -> list[str]:
        return [server.url for server in self.pool.live()]
