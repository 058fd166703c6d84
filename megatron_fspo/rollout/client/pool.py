"""Several vLLM servers as one sampler: every request is answered once, whichever servers die on the way."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from typing import Any

from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.rollout.client.server import Server, ServerLost
from megatron_fspo.rollout.engine import Arrived
from megatron_fspo.rollout.sampling import stream_seed, turn_seed
from megatron_fspo.rollout.trajectory import Trajectory
from megatron_fspo.types import Completion, Prompt, SamplingParams

Find = Callable[[], Sequence[Server]]
"""Returns the servers that are there now, always one object for a server; called in a thread of its own."""
Admit = Callable[[Server], Awaitable[bool]]
"""Asked before a server that was lost serves again: loads the current weights into it. False, or
:class:`~megatron_fspo.rollout.client.server.ServerLost`, keeps it out until the next probe."""

MAX_LOSSES = 8
"""A request that lost its server this often is taken for the reason, and stops the run."""


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """One completion that is wanted, or a turn of it."""

    prompt: Prompt
    params: SamplingParams
    """``n`` and ``seed`` are not looked at."""
    seed: int
    """The random stream, in [0, 2³¹)."""

    @classmethod
    def of(cls, prompt: Prompt, params: SamplingParams, number: int) -> CompletionRequest:
        """The request for completion ``number`` of a prompt, with the random stream of that name."""
        seed = stream_seed(params.seed, prompt.index, number)
        return cls(prompt=prompt, params=params, seed=seed)


@dataclass(eq=False)
class _Slot:
    """A server in the rotation, or out of it."""

    server: Server
    up: bool = True
    losses: int = 0
    reason: str = ""
    """Why it is out."""
    open: int = 0
    """Requests that have it."""
    sampling: set[asyncio.Task[Completion]] = field(default_factory=set)
    probe: asyncio.Task[None] | None = None

    def take_out(self, reason: str) -> None:
        self.up = False
        self.losses += 1
        self.reason = reason


def _next_turn(request: CompletionRequest, trajectory: Trajectory) -> CompletionRequest:
    """The request for the next turn."""
    return CompletionRequest(
        prompt=replace(request.prompt, token_ids=trajectory.read),
        params=replace(request.params, max_tokens=trajectory.turn_limit),
        seed=turn_seed(request.seed, len(trajectory.turns)),
    )


async def _always(server: Server) -> bool:
    return True


@dataclass(eq=False)
class Pool:
    """Spreads requests over servers.

    A server that is lost leaves the rotation and its requests go to the others. While there is work its
    ``/health`` is probed; once that answers and ``admit`` agrees, it serves again. A pool belongs to one
    event loop: all of its methods are called there.
    """

    servers: InitVar[Sequence[Server]]
    """Those that are known; at least one, without ``find``. All count as up at first."""
    _: KW_ONLY
    max_in_flight_per_server: int
    """Requests open at one server at most."""
    vocab_size: int
    """Of the model. A token id outside it would kill a server, so it is refused here."""
    admit: Admit = _always
    recovery_seconds: float = 600.0
    """How long to wait for a server when none is up."""
    request_seconds: float = 1800.0
    """How long one request may take; longer, and its server counts as lost. Requests wait while a server is
    paused."""
    attempts: int = 3
    """Per request and server, see :meth:`Server.post`."""
    find: Find | None = None
    """Finds servers that come while there is work, or before a weight update. They are like lost ones that
    come back; a lost one that is there no more is forgotten."""
    probe_seconds: float = 2.0
    """Between two looks at a lost server, or for new ones; at a lost one it doubles with every refused
    admission, up to 64 times."""

    def __post_init__(self, servers: Sequence[Server]) -> None:
        if not servers and self.find is None:
            raise InputError("no rollout servers are named")
        self._slots = [_Slot(server) for server in servers]
        self._search: asyncio.Task[None] | None = None  # runs while there is work, with ``find``
        self._turns = count()
        # Who waits for a server, a heap by place, with those that it likes best.
        self._queue: list[tuple[int, asyncio.Future[_Slot], Sequence[_Slot]]] = []
        self._batches: set[asyncio.Future[None]] = set()  # one per call of generate(); an error ends the call
        self._patience: asyncio.TimerHandle | None = None  # runs while no server is up

    def live(self) -> list[Server]:
        """The servers in rotation."""
        return [slot.server for slot in self._slots if slot.up]

    async def reachable(self) -> list[Server]:
        """The servers whose ``/health`` answers now, in rotation or not."""
        await self._look_around()
        healthy = await asyncio.gather(*(slot.server.healthy() for slot in self._slots))
        return [slot.server for slot, well in zip(self._slots, healthy, strict=True) if well]

    async def serve(self, servers: Sequence[Server]) -> None:
        """Have these serve from here on, and no others: they have the current weights.

        Requests that are open at the others are asked anew.
        """
        for slot in self._slots:
            if slot.server in servers:
                slot.up = True
            else:
                slot.take_out(f"{slot.server.url}: not reached by the last weight update")
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
        """Return one completion per request, in their order. Requests of an earlier call go first.

        Args:
            requests: prompts with their sampling parameters and seeds.
            arrived: called in the event loop's thread; the number is that of the request.
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
        """Take turn after turn, each of a server that has answered, and of the environment."""
        place, trajectory = next(self._turns), Trajectory(request.prompt, request.params)
        near: list[_Slot] = []
        losses = 0
        while trajectory.finish_reason is None:
            try:
                turn = await self._ask(place, _next_turn(request, trajectory), oldest_version, near)
            except ServerLost as error:
                losses += 1
                if losses == MAX_LOSSES:
                    what = f"rollout request {position} lost its server {losses} times: {error}"
                    raise TrainingError(what) from None
                continue
            losses = 0
            if trajectory.add(turn):
                assert request.params.environment is not None
                reply = request.params.environment.answer(request.prompt, trajectory.turns, trajectory)
                trajectory.take(await asyncio.wrap_future(reply))
        completion = trajectory.completion()
        if arrived is not None:
            arrived(position, completion)
        return completion

    async def _ask(
        self, place: int, request: CompletionRequest, oldest_version: int, near: list[_Slot]
    ) -> Completion:
        """Wait for a server and ask it: that of the turn before where it is free, which knows what it read.
        ``near`` holds it."""
        while True:
            slot = await self._wait_for_slot(place, near)
            near[:] = [slot]
            losses = slot.losses
            sampling = asyncio.create_task(self._sample(slot.server, request, oldest_version))
            slot.sampling.add(sampling)
            try:
                await asyncio.wait([sampling])
                if not sampling.cancelled():  # else its server was taken out under it
                    return sampling.result()
            except ServerLost as error:
                if slot.losses == losses:  # else it was lost, and perhaps came back, since it was asked
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
        """One of ``near``, or else the least loaded server, once it is this place's turn."""
        granted: asyncio.Future[_Slot] = asyncio.get_running_loop().create_future()
        heappush(self._queue, (place, granted, near))
        self._grant()
        try:
            return await granted
        except asyncio.CancelledError:
            if not granted.cancelled():  # in the same moment
                granted.result().open -= 1
                self._grant()
            raise

    def _grant(self) -> None:
        """Give servers to those whose turn it is, while any may have more requests."""
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
            raise ServerLost(f"{server.url}: sampled with weights {versions}: was it restarted?")
        return completion

    def _reschedule(self) -> list[asyncio.Task[None]]:
        """While there is work, look after lost servers and for new ones; called whenever something changed.

        Returns:
            looks that were cancelled.
        """
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
            seconds, loop = self.recovery_seconds, asyncio.get_running_loop()
            self._patience = loop.call_later(seconds, self._give_up)
            said = f"no vLLM server serves: {self._reasons()}; waiting up to {seconds:g} s for one"
            print(f"megatron-fspo: {said}", file=sys.stderr, flush=True)
        elif not none_up and self._patience is not None:
            self._patience.cancel()
            self._patience = None
        return cancelled

    def _give_up(self) -> None:
        self._fail(TrainingError(f"no rollout server for {self.recovery_seconds:g} s: {self._reasons()}"))

    def _reasons(self) -> str:
        return "; ".join(slot.reason for slot in self._slots) or "none has announced itself"

    def _fail(self, error: Exception) -> None:
        """End every batch."""
        for trouble in self._batches:
            if not trouble.done():
                trouble.set_exception(error)

    async def _keep_looking(self) -> None:
        while True:
            if await self._look_around():
                self._reschedule()
            await asyncio.sleep(self.probe_seconds)

    async def _look_around(self) -> bool:
        """Know the servers that are there now, new ones out of rotation; returns True if anything changed."""
        if self.find is None:
            return False
        there = await asyncio.to_thread(self.find)
        known = [slot.server for slot in self._slots]
        gone = [slot for slot in self._slots if not slot.up and slot.server not in there]
        new = [_Slot(server) for server in there if server not in known]
        for slot in new:
            slot.take_out(f"{slot.server.url}: has no weights of the trainer yet")
        for slot in gone:
            if slot.probe is not None:
                slot.probe.cancel()
        self._slots = [slot for slot in self._slots if slot not in gone] + new
        return bool(new or gone)

    async def _bring_back(self, slot: _Slot) -> None:
        """Put a lost server into rotation again once it is healthy and admitted."""
        wait = self.probe_seconds
        while True:
            if await slot.server.healthy():
                try:
                    if await self.admit(slot.server):
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
