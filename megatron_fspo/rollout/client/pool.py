"""Uses several vLLM servers as one sampler, and answers every request exactly once even if servers die."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from typing import Any

from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.rollout.client.server import Server, ServerLost
from megatron_fspo.rollout.engine import Arrived
from megatron_fspo.rollout.sampling import stream_seed, turn_seed
from megatron_fspo.rollout.trajectory import Trajectory, silent
from megatron_fspo.types import Completion, Prompt, Reply, SamplingParams

Find = Callable[[], Sequence[Server]]
"""Returns the current servers, always the same object for a server. Called in a separate thread."""
Admit = Callable[[Server], Awaitable[bool]]
"""Called before a lost server returns to rotation; loads the current weights into it. False, or
:class:`~megatron_fspo.rollout.client.server.ServerLost`, keeps it out until the next probe."""

_REMIND_SECONDS = 60.0
MAX_DISCONNECTS = 8
"""A request that loses its server this often in a row is considered the cause, and stops the run."""


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """Request for one completion, or for a turn of it."""

    prompt: Prompt
    params: SamplingParams
    """``n`` and ``seed`` are ignored."""
    seed: int
    """Seed of the random stream, in [0, 2³¹)."""

    @classmethod
    def of(cls, prompt: Prompt, params: SamplingParams, number: int) -> CompletionRequest:
        """Return the request for completion ``number`` of a prompt, with its own random stream."""
        seed = stream_seed(params.seed, prompt.index, number)
        return cls(prompt=prompt, params=params, seed=seed)


@dataclass(eq=False)
class _Slot:
    """A server, in rotation or out of it."""

    server: Server
    up: bool = True
    disconnects: int = 0
    reason: str = ""
    """Why it is out of rotation."""
    open: int = 0
    """Number of requests assigned to it."""
    sampling: set[asyncio.Task[Completion]] = field(default_factory=set)
    probe: asyncio.Task[None] | None = None

    def take_out(self, reason: str) -> None:
        self.up = False
        self.disconnects += 1
        self.reason = reason


@dataclass(eq=False)
class Pool:
    """Distributes requests over servers.

    A lost server leaves the rotation, and its requests go to others. While there is work the pool probes its
    ``/health``. When that succeeds and ``admit`` agrees, the server returns to rotation. All methods must be
    called in the same event loop.
    """

    servers: InitVar[Sequence[Server]]
    """Known servers, assumed to be up; at least one, unless ``find`` is set."""
    _: KW_ONLY
    max_in_flight_per_server: int
    """Maximum number of open requests per server."""
    vocab_size: int
    """Vocabulary size of the model. Token ids outside it would kill a server, so they are refused here."""
    admit: Admit | None = None
    recovery_seconds: float = 600.0
    """How long to wait for a server when none is up."""
    request_seconds: float = 1800.0
    """Time limit of a request, including pauses of the server. A server that exceeds it counts as lost."""
    attempts: int = 3
    """Attempts per request and server, see :meth:`Server.post`."""
    find: Find | None = None
    """Lists servers, to add new ones while there is work and before weight updates. They are admitted like
    lost servers that return. Lost servers that it no longer lists are removed."""
    probe_seconds: float = 2.0
    """Time between probes of a lost server, and between calls of ``find``. It doubles with each refused
    admission of the server, up to 64 times."""

    def __post_init__(self, servers: Sequence[Server]) -> None:
        if not servers and self.find is None:
            raise InputError("no rollout servers: set vllm.urls or vllm.discovery")
        self._slots = [_Slot(server) for server in servers]
        self._search: asyncio.Task[None] | None = None  # runs while there is work, with ``find``
        self._places = count()
        self._replied = 0.0  # when the environment's last reply arrived
        # Heap of requests that wait for a server: place in the queue, future, preferred servers.
        self._queue: list[tuple[int, asyncio.Future[_Slot], Sequence[_Slot]]] = []
        self._batches: set[asyncio.Future[None]] = set()  # one per call of generate(); an error ends the call
        self._patience: asyncio.TimerHandle | None = None  # runs while no server is up

    def live(self) -> list[Server]:
        """Return the servers in rotation."""
        return [slot.server for slot in self._slots if slot.up]

    def ended(self) -> Counter[str]:
        """Return the number of responses that servers ended early, by finish_reason."""
        return sum((slot.server.ended for slot in self._slots), Counter())

    async def reachable(self) -> list[Server]:
        """Return the servers whose ``/health`` answers now, in rotation or not."""
        await self._look_around()
        healthy = await asyncio.gather(*(slot.server.healthy() for slot in self._slots))
        return [slot.server for slot, well in zip(self._slots, healthy, strict=True) if well]

    async def serve(self, servers: Sequence[Server]) -> None:
        """Put these servers, which have the current weights, in rotation, and all others out.

        Requests that are open at the others are sent again.
        """
        for slot in self._slots:
            if slot.server in servers:
                slot.up = True
            else:
                slot.take_out(slot.server.problem or f"{slot.server.url}: missed the last weight update")
                for task in slot.sampling:
                    task.cancel()
        self._reschedule()

    async def generate(
        self,
        requests: Sequence[CompletionRequest],
        arrived: Arrived | None = None,
        *,
        oldest_version: int = 0,
    ) -> list[Completion]:
        """Return one completion per request, in order. Requests of earlier calls have priority.

        Args:
            requests: prompts with their sampling parameters and seeds.
            arrived: called in the event loop's thread, with the position of the request as number.
            oldest_version: oldest weight version allowed for any token. A server that samples with an older
                one was restarted meanwhile: its answer is dropped, and it has to be admitted again.

        Raises:
            InputError: a prompt is empty or has a token id outside the vocabulary; or a server refused.
            BadAnswer: a server's answer is invalid. The other requests are cancelled.
            TrainingError: no server was up for ``recovery_seconds``, or a request kept losing its server.
        """
        for position, request in enumerate(requests):
            self._check(position, request)
        trouble: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._batches.add(trouble)
        self._reschedule()
        tasks = [
            asyncio.create_task(self._answer(position, request, arrived, oldest_version))
            for position, request in enumerate(requests)
        ]
        answers = asyncio.gather(*tasks)
        try:
            ends: list[asyncio.Future[Any]] = [answers, trouble]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if trouble.done():
                trouble.result()
            return answers.result()
        finally:
            self._batches.discard(trouble)
            ending: list[asyncio.Future[Any]] = [*tasks, *self._reschedule(), answers]
            for future in ending:
                future.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    def _check(self, position: int, request: CompletionRequest) -> None:
        ids, size = request.prompt.token_ids, self.vocab_size
        if not ids:
            raise InputError(f"rollout request {position} has an empty prompt")
        for what, tokens in (("prompt", ids), ("stop", request.params.stop_token_ids)):
            if tokens and not 0 <= min(tokens) <= max(tokens) < size:
                wrong = next(token for token in tokens if not 0 <= token < size)
                where = f"rollout request {position}: {what} token {wrong}"
                raise InputError(f"{where} is outside the model's vocabulary of {size}")

    async def _answer(
        self, position: int, request: CompletionRequest, arrived: Arrived | None, oldest_version: int
    ) -> Completion:
        """Sample turn after turn, with the environment's replies, and retry turns whose server is lost."""
        place, trajectory = next(self._places), Trajectory(request.prompt, request.params)
        near: list[_Slot] = []
        disconnects = 0
        while trajectory.finish_reason is None:
            next_turn = CompletionRequest(
                prompt=replace(request.prompt, token_ids=trajectory.read),
                params=replace(request.params, max_tokens=trajectory.turn_limit),
                seed=turn_seed(request.seed, len(trajectory.turns)),
            )
            try:
                turn = await self._ask(place, next_turn, oldest_version, near)
            except ServerLost as error:
                disconnects += 1
                if disconnects == MAX_DISCONNECTS:
                    what = f"rollout request {position} lost its server {disconnects} times: {error}"
                    raise TrainingError(what) from None
                continue
            disconnects = 0
            if trajectory.add(turn):
                trajectory.take(await self._reply(request, trajectory))
        completion = trajectory.completion()
        if arrived is not None:
            arrived(position, completion)
        return completion

    async def _reply(self, request: CompletionRequest, trajectory: Trajectory) -> Reply:
        """Wait for the environment, unless none of its replies has arrived for too long."""
        environment = request.params.environment
        assert environment is not None
        reply = asyncio.wrap_future(environment.answer(request.prompt, trajectory.turns, trajectory))
        try:
            while not (await asyncio.wait([reply], timeout=environment.limit_seconds))[0]:
                if time.monotonic() - self._replied > environment.limit_seconds:
                    raise silent(environment, request.prompt.index)
            self._replied = time.monotonic()
            return reply.result()
        finally:
            reply.cancel()

    async def _ask(
        self, place: int, request: CompletionRequest, oldest_version: int, near: list[_Slot]
    ) -> Completion:
        """Wait for a server and ask it. The previous turn's server, in ``near``, is preferred, as it may have
        the context cached."""
        while True:
            slot = await self._wait_for_slot(place, near)
            near[:] = [slot]
            disconnects = slot.disconnects
            sampling = asyncio.create_task(self._sample(slot.server, request, oldest_version))
            slot.sampling.add(sampling)
            try:
                await asyncio.wait([sampling])
                if not sampling.cancelled():  # else the server left the rotation
                    return sampling.result()
            except ServerLost as error:
                if slot.disconnects == disconnects:  # else another request has noticed the loss
                    slot.take_out(str(error))
                raise
            except asyncio.CancelledError:
                sampling.cancel()
                await asyncio.wait([sampling])
                raise
            finally:
                slot.sampling.discard(sampling)
                slot.open -= 1
                self._reschedule()

    async def _wait_for_slot(self, place: int, near: Sequence[_Slot]) -> _Slot:
        """Wait in the queue; return a server of ``near`` if one is free, else the least loaded server."""
        granted: asyncio.Future[_Slot] = asyncio.get_running_loop().create_future()
        heappush(self._queue, (place, granted, near))
        self._grant()
        try:
            return await granted
        except asyncio.CancelledError:
            if not granted.cancelled():  # a server was granted in the same moment
                granted.result().open -= 1
                self._grant()
            raise

    def _grant(self) -> None:
        """Assign servers with free capacity to waiting requests, in order."""
        while self._queue:
            limit = self.max_in_flight_per_server
            free = [slot for slot in self._slots if slot.up and slot.open < limit]
            if not free:
                return
            _, granted, near = heappop(self._queue)
            if not granted.done():  # else its batch was cancelled
                slot = min(free, key=lambda slot: (slot not in near, slot.open))
                slot.open += 1
                granted.set_result(slot)

    async def _sample(self, server: Server, request: CompletionRequest, oldest_version: int) -> Completion:
        completion = await server.generate(
            request.prompt.token_ids,
            request.params,
            seed=request.seed,
            timeout=self.request_seconds,
            attempts=self.attempts,
        )
        if completion.weight_version < oldest_version:
            versions = f"{completion.weight_version}, older than {oldest_version}"
            raise ServerLost(f"{server.url}: sampled with weight version {versions}: was it restarted?")
        return completion

    def _reschedule(self) -> list[asyncio.Task[None]]:
        """Assign servers; start or stop probes of lost servers and the search for new ones. Call this after
        every change. Return the cancelled tasks."""
        self._grant()
        at_work = bool(self._batches)
        cancelled = []
        if at_work and self.find is not None and self._search is None:
            self._search = asyncio.create_task(self._keep_looking())
        elif not at_work and self._search is not None:
            cancelled.append(self._search)
            self._search = None
        for slot in self._slots:
            wanted = at_work and not slot.up
            if wanted and (slot.probe is None or slot.probe.done()):
                slot.probe = asyncio.create_task(self._bring_back(slot))
            elif not wanted and slot.probe is not None:
                cancelled.append(slot.probe)
                slot.probe = None
        for look in cancelled:
            look.cancel()
        none_up = at_work and not self.live()
        if none_up and self._patience is None:
            self._wait_for_one(self.recovery_seconds)
        elif not none_up and self._patience is not None:
            self._patience.cancel()
            self._patience = None
        return cancelled

    def _wait_for_one(self, seconds: float) -> None:
        """Say every minute how long the pool still waits for a server; at the end, end the calls."""
        if seconds <= 0:
            self._fail(TrainingError(f"no rollout server for {self.recovery_seconds:g} s: {self._reasons()}"))
            return
        said = f"no vLLM server is available: {self._reasons()}; waiting up to {seconds:g} s for one"
        print(f"megatron-fspo: {said}", file=sys.stderr, flush=True)
        pause = min(seconds, _REMIND_SECONDS)
        self._patience = asyncio.get_running_loop().call_later(pause, self._wait_for_one, seconds - pause)

    def _reasons(self) -> str:
        return "; ".join(slot.reason for slot in self._slots) or "none has announced itself"

    def _fail(self, error: Exception) -> None:
        """End all calls of :meth:`generate` with an error."""
        for trouble in self._batches:
            if not trouble.done():
                trouble.set_exception(error)

    async def _keep_looking(self) -> None:
        while True:
            if await self._look_around():
                self._reschedule()
            await asyncio.sleep(self.probe_seconds)

    async def _look_around(self) -> bool:
        """Update the known servers, with new ones out of rotation. Return True if they changed."""
        if self.find is None:
            return False
        there = await asyncio.to_thread(self.find)
        known = [slot.server for slot in self._slots]
        gone = [slot for slot in self._slots if not slot.up and slot.server not in there]
        new = [_Slot(server) for server in there if server not in known]
        for slot in new:
            slot.take_out(f"{slot.server.url}: does not have the trainer's weights yet")
        for slot in gone:
            if slot.probe is not None:
                slot.probe.cancel()
        self._slots = [slot for slot in self._slots if slot not in gone] + new
        return bool(new or gone)

    async def _bring_back(self, slot: _Slot) -> None:
        """Return a lost server to rotation once it is healthy and admitted."""
        wait = self.probe_seconds
        while True:
            if await slot.server.healthy():
                try:
                    if self.admit is None or await self.admit(slot.server):
                        break
                    wait = min(2 * wait, 64 * self.probe_seconds)
                except ServerLost as error:
                    slot.reason = str(error)
                except Exception as error:
                    self._fail(error)
                    return
            await asyncio.sleep(wait)
        slot.up = True
        slot.probe = None
        self._reschedule()
