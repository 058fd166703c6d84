"""Several vLLM servers as one sampler: every request is answered once, whichever servers die on the way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.rollout.engine import Progress
from megatron_fspo.rollout.sampling import stream_seed
from megatron_fspo.rollout.vllm.answers import read_completion
from megatron_fspo.rollout.vllm.server import Server, ServerLost
from megatron_fspo.types import Completion, Prompt, SamplingParams

Admit = Callable[[Server], Awaitable[bool]]
"""Asked before a server that was lost serves again: the place to load the current weights into it. False, or
:class:`~megatron_fspo.rollout.vllm.server.ServerLost`, keeps it out until the next probe."""

MAX_LOSSES = 8
"""A request that lost its server this often is taken for the reason, and stops the run."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One completion that is wanted."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    """``n`` and ``seed`` are not looked at."""
    seed: int
    """In [0, 2³¹)."""

    @classmethod
    def of(cls, prompt: Prompt, params: SamplingParams, number: int) -> Request:
        """For completion ``number`` of a prompt, with the random stream of that name."""
        seed = stream_seed(params.seed, prompt.index, number)
        return cls(prompt_ids=prompt.token_ids, params=params, seed=seed)


class _Slot:
    """A server's place in the rotation."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.open = 0
        self.up = True
        self.losses = 0
        self.reason = ""
        self.admitting = False


async def _always(server: Server) -> bool:
    return True


class Pool:
    """Spreads requests over servers.

    A server that is lost leaves the rotation and its requests go to the others. While a batch is under way
    its ``/health`` is probed; once that answers and ``admit`` agrees, it serves again. A pool belongs to one
    event loop.

    Args:
        servers: at least one. All count as up at first.
        max_in_flight_per_server: requests open at one server at most.
        vocab_size: of the model. A token id outside it would kill a server, so it is refused here.
        admit: see :data:`Admit`; by default every healthy server is admitted.
        recovery_seconds: how long to wait for a server when none is up.
        request_seconds: how long one request may take; longer, and its server counts as lost. Requests wait
            while a server is paused.
        attempts: per request and server, see :meth:`Server.post`.
        probe_seconds: between two looks at a lost server.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        max_in_flight_per_server: int,
        vocab_size: int,
        admit: Admit = _always,
        recovery_seconds: float = 600.0,
        request_seconds: float = 1800.0,
        attempts: int = 3,
        probe_seconds: float = 2.0,
    ) -> None:
        if not servers:
            raise InputError("no rollout servers are named")
        self._slots = [_Slot(server) for server in servers]
        self.max_in_flight = max_in_flight_per_server
        self.vocab_size = vocab_size
        self.admit = admit
        self.recovery_seconds = recovery_seconds
        self.request_seconds = request_seconds
        self.attempts = attempts
        self.probe_seconds = probe_seconds
        self._turn = asyncio.Lock()

    def live(self) -> list[Server]:
        """The servers in rotation."""
        return [slot.server for slot in self._slots if slot.up]

    async def reachable(self) -> list[Server]:
        """The servers whose ``/health`` answers now, in rotation or not."""
        healthy = await asyncio.gather(*(slot.server.healthy() for slot in self._slots))
        return [slot.server for slot, well in zip(self._slots, healthy, strict=True) if well]

    def serve(self, servers: Sequence[Server]) -> None:
        """From here on these serve, and no others: they have the current weights. Not during a batch."""
        for slot in self._slots:
            if slot.server in servers:
                slot.up = True
            else:
                _take_out(slot, f"{slot.server.url}: not reached by the last weight update")

    async def generate(
        self,
        requests: Sequence[Request],
        on_done: Progress | None = None,
        *,
        oldest_version: int = 0,
    ) -> list[Completion]:
        """One completion per request, in their order. A second call waits for the first.

        Args:
            on_done: called with 1 for each completion, in the event loop's thread; it must not block.
            oldest_version: no completion may have a token from weights before these. A server that samples
                with older ones was restarted behind our back: its answer is dropped, and it has to be
                admitted again.

        Raises:
            InputError: a prompt that is empty or has a token id outside the vocabulary; a server refused.
            BadAnswer: a server answered what was not asked for. The other requests are cancelled.
            TrainingError: no server for ``recovery_seconds``, or a request that no server survives.
        """
        for position, request in enumerate(requests):
            self._check(position, request)
        async with self._turn:
            return await _Batch(self, self._slots, requests, on_done, oldest_version).run()

    def _check(self, position: int, request: Request) -> None:
        ids = request.prompt_ids
        if not ids:
            raise InputError(f"rollout request {position} has an empty prompt")
        for what, tokens in (("prompt", ids), ("stop", request.params.stop_token_ids)):
            if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
                wrong = next(token for token in tokens if not 0 <= token < self.vocab_size)
                raise InputError(
                    f"rollout request {position}: {what} token {wrong} is outside the model's vocabulary"
                    f" of {self.vocab_size}"
                )


class _Batch:
    """One call of :meth:`Pool.generate`. Each request is waiting, or open in exactly one task, or done."""

    def __init__(
        self,
        pool: Pool,
        slots: Sequence[_Slot],
        requests: Sequence[Request],
        on_done: Progress | None,
        oldest_version: int,
    ) -> None:
        self._pool = pool
        self._slots = slots
        self._requests = requests
        self._on_done = on_done
        self._oldest_version = oldest_version
        self._waiting = deque(range(len(requests)))
        self._done: dict[int, Completion] = {}
        self._lost: dict[int, int] = {}  # request → how often its server was lost
        self._open: dict[asyncio.Task[Completion], tuple[int, _Slot, int]] = {}  # → request, slot, its losses
        self._probes: dict[asyncio.Task[Any], _Slot] = {}
        self._ended: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()  # of both kinds
        self._none_up_since: float | None = None

    async def run(self) -> list[Completion]:
        try:
            while not self._complete():
                self._send()
                self._probe()
                await self._next()
            await self._end_probes()
        finally:
            tasks = [*self._open, *self._probes]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for slot in self._slots:
                slot.open, slot.admitting = 0, False
        return [self._done[i] for i in range(len(self._requests))]

    def _complete(self) -> bool:
        return len(self._done) == len(self._requests)

    def _send(self) -> None:
        """Open as many requests as the servers may have, the least loaded server first."""
        while self._waiting:
            free = [slot for slot in self._slots if slot.up and slot.open < self._pool.max_in_flight]
            if not free:
                return
            slot = min(free, key=lambda slot: slot.open)
            index = self._waiting.popleft()
            task = asyncio.create_task(self._sample(slot.server, self._requests[index]))
            slot.open += 1
            self._open[task] = (index, slot, slot.losses)
            task.add_done_callback(self._ended.put_nowait)

    def _probe(self) -> None:
        """Have every lost server watched by one task."""
        for slot in self._slots:
            if not slot.up and slot not in self._probes.values():
                probe = asyncio.create_task(self._bring_back(slot))
                self._probes[probe] = slot
                probe.add_done_callback(self._ended.put_nowait)

    async def _next(self) -> None:
        """Wait for a task to end and book what it brought."""
        now = asyncio.get_running_loop().time()
        if any(slot.up for slot in self._slots):
            self._none_up_since = None
        elif self._none_up_since is None:
            self._none_up_since = now
        limit = None if self._none_up_since is None else self._none_up_since + self._pool.recovery_seconds
        try:
            async with asyncio.timeout_at(limit):
                task = await self._ended.get()
        except TimeoutError:
            reasons = "; ".join(slot.reason for slot in self._slots)
            raise TrainingError(
                f"no rollout server for {self._pool.recovery_seconds:g} s: {reasons}"
            ) from None
        if task in self._probes:
            del self._probes[task]
            task.result()
        else:
            self._book(task)

    def _book(self, task: asyncio.Task[Completion]) -> None:
        index, slot, losses = self._open.pop(task)
        slot.open -= 1
        try:
            self._done[index] = task.result()
        except ServerLost as error:
            if slot.losses == losses:  # else it was lost, and perhaps came back, since the request was sent
                _take_out(slot, str(error))
            self._lost[index] = self._lost.get(index, 0) + 1
            if self._lost[index] >= MAX_LOSSES:
                raise TrainingError(
                    f"rollout request {index} lost its server {MAX_LOSSES} times; the last: {error}"
                ) from error
            self._waiting.appendleft(index)
        else:
            if self._on_done is not None:
                self._on_done(1)

    async def _sample(self, server: Server, request: Request) -> Completion:
        answer = await server.generate(
            request.prompt_ids,
            request.params,
            seed=request.seed,
            timeout=self._pool.request_seconds,
            attempts=self._pool.attempts,
        )
        completion = read_completion(answer, params=request.params, where=server.url)
        if completion.weight_version < self._oldest_version:
            raise ServerLost(
                f"{server.url}: sampled with weights {completion.weight_version}, older than"
                f" {self._oldest_version}: was it restarted?"
            )
        return completion

    async def _bring_back(self, slot: _Slot) -> None:
        """Put a lost server into rotation again once it is healthy and admitted."""
        while not self._complete():
            if await slot.server.healthy():
                slot.admitting = True
                try:
                    slot.up = await self._pool.admit(slot.server)
                except ServerLost as error:
                    slot.reason = str(error)
                finally:
                    slot.admitting = False
                if slot.up:
                    return
            await asyncio.sleep(self._pool.probe_seconds)

    async def _end_probes(self) -> None:
        """Stop the probes. An admission under way is seen through: half of an update is no update."""
        for probe, slot in self._probes.items():
            if not slot.admitting:
                probe.cancel()
        # An error of an admission is not this batch's: the server stays out, and is asked again.
        await asyncio.gather(*self._probes, return_exceptions=True)


def _take_out(slot: _Slot, reason: str) -> None:
    slot.up = False
    slot.losses += 1
    slot.reason = reason
