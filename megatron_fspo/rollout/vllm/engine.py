"""Rollouts from vLLM servers, as the trainer sees them: generate, and new weights that are proven.

The first rank of the job talks to the servers; what the other ranks do here is collective with it: they bring
prompts, gather weights and score the canary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import httpx
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.errors import TrainingError
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.parallel.metrics import gather_lists, share
from megatron_fspo.rollout.engine import Progress
from megatron_fspo.rollout.vllm import canary, update
from megatron_fspo.rollout.vllm.loop import Loop
from megatron_fspo.rollout.vllm.pool import Pool, Request
from megatron_fspo.rollout.vllm.senders import Sender
from megatron_fspo.rollout.vllm.server import Server
from megatron_fspo.types import Completion, Prompt, SamplingParams

ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """What the engine asks of the trainer. Every rank calls both at the same time."""

    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    """The weights under their Hugging Face names, on the first rank; collective."""
    score: Callable[[Sequence[Sequence[int]]], list[Tensor] | None]
    """Per sequence of n tokens the log-probs [n - 1] of all but the first, at temperature 1, on the first
    rank; collective."""


@dataclass(frozen=True, kw_only=True)
class Leader:
    """What only the first rank has."""

    loop: Loop
    http: httpx.AsyncClient
    pool: Pool
    sender: Sender


class VLLMEngine:
    """A :class:`~megatron_fspo.rollout.engine.RolloutEngine`.

    Args:
        leader: None on all ranks but the first.
        canary_sequences: token ids that trainer and servers score after every update.
        tolerance: largest |Δ log-prob| allowed there, in nats.
    """

    def __init__(
        self,
        trainer: Trainer,
        groups: ParallelGroups,
        leader: Leader | None,
        *,
        canary_sequences: Sequence[Sequence[int]],
        tolerance: float,
    ) -> None:
        self._trainer = trainer
        self._groups = groups
        self._leader = leader
        self._canary = canary_sequences
        self._tolerance = tolerance
        self._version = 0
        self._returned: SimpleQueue[Any] = SimpleQueue()
        self._canary_error = float("nan")
        if leader is not None:
            leader.pool.admit = self._admit

    def pause(self) -> None:
        """Servers pause while they are updated, and no longer."""

    def resume(self) -> None:
        """See :meth:`pause`."""

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, progress: Progress | None = None
    ) -> list[list[Completion]]:
        """See the protocol. A server that dies is done without, and served again when it is back."""
        mine = [(self._groups.dp.rank(), prompt) for prompt in prompts]
        everyone = gather_lists(mine, group=self._groups.dp)
        requests = [
            Request.of(prompt, params, number) for _, prompt in everyone for number in range(params.n)
        ]
        found = self._lead(requests, progress) if self._leader else self._follow()
        rows = [found[i : i + params.n] for i in range(0, len(found), params.n)]
        return [row for (rank, _), row in zip(everyone, rows, strict=True) if rank == self._groups.dp.rank()]

    def _lead(self, requests: Sequence[Request], progress: Progress | None) -> list[Completion]:
        """Ask for the completions; meanwhile give servers that come back the current weights."""
        assert self._leader is not None
        events: SimpleQueue[_Returned | Future[list[Completion]]] = SimpleQueue()
        self._returned = events
        work = self._leader.loop.submit(self._generate(requests, progress))
        work.add_done_callback(events.put)
        while isinstance(event := events.get(), _Returned):
            share(("update", None), group=_world())
            event.answer(self._update([event.server]) is None)
        problem = event.exception()
        share(("failed", str(problem)) if problem else ("done", event.result()), group=_world())
        if problem:
            raise problem
        return event.result()

    async def _generate(self, requests: Sequence[Request], progress: Progress | None) -> list[Completion]:
        assert self._leader is not None
        return await self._leader.pool.generate(requests, progress, oldest_version=self._version)

    async def _admit(self, server: Server) -> bool:
        """Whether a server that came back has the current weights; gives them to it. For the pool."""
        returned = _Returned(server, asyncio.get_running_loop().create_future())
        self._returned.put(returned)
        return await returned.admitted

    def _follow(self) -> list[Completion]:
        while True:
            what, value = share(("", None), group=_world())
            if what == "done":
                return value  # type: ignore[return-value]
            if what == "failed":
                raise TrainingError(str(value))
            self._update([])

    def update_weights(self, version: int) -> None:
        """Send the trainer's weights to every server and prove that they arrived. Collective.

        Raises:
            TrainingError: on every rank; a server has other weights than the trainer, or none took them.
        """
        self._version = version
        for _ in range(ATTEMPTS):
            servers = self._leader.loop.run(self._leader.pool.reachable()) if self._leader else []
            problem = self._update(servers)
            told = share(None if problem is None else str(problem), group=_world())
            if told is None:
                if self._leader:
                    self._leader.pool.serve(servers)
                return
        raise TrainingError(f"no weight update to version {version} in {ATTEMPTS} attempts: {told}")

    def _update(self, servers: Sequence[Server]) -> Exception | None:
        """Send and prove; returns, on the first rank, why servers did not take the weights. Collective.

        Raises:
            WrongWeights: on every rank; a server took other weights.
        """
        want = self._trainer.score(self._canary)
        if self._leader is None:
            for _ in self._trainer.tensors():
                pass
            verdict = None
        else:
            assert want is not None
            verdict = self._send_and_check(servers, want)
        wrong = share(str(verdict) if isinstance(verdict, canary.WrongWeights) else None, group=_world())
        if wrong is not None:
            raise canary.WrongWeights(wrong)
        return verdict

    def _send_and_check(self, servers: Sequence[Server], want: Sequence[Tensor]) -> Exception | None:
        assert self._leader is not None
        loop, sender = self._leader.loop, self._leader.sender
        problem = update.send_weights(servers, sender, loop, self._trainer.tensors(), self._version)
        if problem is not None:
            return problem
        try:
            loop.run(update.resume(servers))
            errors = []
            for server in servers:
                got = loop.run(canary.ask(server, self._canary))
                errors.append(canary.check(server.url, self._version, got, want, self._tolerance))
            self._canary_error = max(errors, default=float("nan"))
        except Exception as error:
            return error
        return None

    def metrics(self) -> dict[str, float]:
        return {"rollout/canary_abs_diff_max": self._canary_error}

    def close(self) -> None:
        """Let go of servers and groups."""
        if self._leader is not None:
            self._leader.sender.close()
            self._leader.loop.run(self._leader.http.aclose())
            self._leader.loop.close()


@dataclass(frozen=True)
class _Returned:
    """A server that came back, and waits for weights."""

    server: Server
    admitted: asyncio.Future[bool]

    def answer(self, admitted: bool) -> None:
        def tell() -> None:
            if not self.admitted.done():  # else the batch failed meanwhile, and cancelled its probes
                self.admitted.set_result(admitted)

        self.admitted.get_loop().call_soon_threadsafe(tell)


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
