"""The rollout engine for vLLM servers: sampling, and weight updates that are verified.

The job's first rank leads. It talks to the servers, and instructs the other ranks to join it in gathering
weights and scoring the canary. While it waits for servers, the others wait for its next instruction, outside
of collectives.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from queue import Empty, SimpleQueue

import httpx
import torch
from torch import Tensor

from megatron_fspo.errors import InputError, StopRequested, TrainingError
from megatron_fspo.job.remote import Loop
from megatron_fspo.parallel.control import SLICE
from megatron_fspo.parallel.groups import ParallelGroups, gather_lists
from megatron_fspo.rollout.checksum import Checksum
from megatron_fspo.rollout.client import memory_phases, proof, send_weights
from megatron_fspo.rollout.client.memory_phases import Memory, MemoryPhase
from megatron_fspo.rollout.client.pool import CompletionRequest, Pool
from megatron_fspo.rollout.client.scatter import scatter_completions
from megatron_fspo.rollout.client.server import Server, ServerLost
from megatron_fspo.rollout.engine import Arrived, Pending, Progress
from megatron_fspo.types import Completion, Prompt, SamplingParams

ATTEMPTS = 3
_PHASE = "phase: "
_RESPONSES = "responses of the servers"


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Functions of the trainer for the engine. All of them are collective."""

    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    """Yields the weights under their Hugging Face names, on the first rank."""
    base: Callable[[], Iterator[tuple[str, Tensor]]] | None = None
    """If ``tensors`` are adapters: yields the servers' other weights in the same way."""
    score: Callable[[Sequence[Sequence[int]]], list[Tensor] | None]
    """Returns, per sequence of n tokens, the log-probs [n - 1] of all but the first, at temperature 1, on the
    first rank."""


@dataclass(frozen=True, kw_only=True)
class Leader:
    """The client of the servers, on the first rank only."""

    loop: Loop
    http: httpx.AsyncClient
    pool: Pool
    sender: send_weights.Sender


@dataclass(eq=False)
class VLLMEngine:
    """A :class:`~megatron_fspo.rollout.engine.RolloutEngine`."""

    trainer: Trainer
    groups: ParallelGroups
    leader: Leader | None
    """None on all ranks but the first."""
    _: KW_ONLY
    canary_sequences: Sequence[Sequence[int]]
    """Token ids that trainer and servers score after every update."""
    dtype: torch.dtype = torch.float32
    """Dtype of the trainer's weights."""
    tolerance: float | None = None
    """Largest mean |Δ log-prob| allowed for the canary, in nats; None: set by the first update."""
    memory: Memory | None = None
    """Memory of this rank, if trainer and servers share GPUs. The servers must be asleep at first."""

    def __post_init__(self) -> None:
        self._control = self.groups.control
        self._version = 0
        # Returning servers that wait for weights, each with a future; None: a completion arrived, or all did.
        self._events: SimpleQueue[tuple[Server, asyncio.Future[bool]] | None] = SimpleQueue()
        self._canary_error = float("nan")
        self._base: dict[str, Checksum] = {}
        self._proven = False
        self._phase = MemoryPhase.TRAINER  # not used without shared memory
        self._phase_seconds = 0.0
        if self.leader is not None:
            self.leader.pool.admit = self._admit

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        mine: range | None = None,
        arrived: Arrived | None = None,
    ) -> Pending:
        """See the protocol. Requests are sent at once, and servers answer while the trainer does other work.

        Responses that are open during a weight update continue with the new weights. Requests of a lost
        server go to others, and it gets the current weights when it returns. The first rank calls ``arrived``
        for every completion, in the thread of the event loop.
        """
        self._switch_to(MemoryPhase.SERVERS)
        wanted = range(len(prompts)) if mine is None else mine
        requests = [CompletionRequest.of(prompt, params, i) for prompt in prompts for i in range(params.n)]
        leader = self.leader
        answered: list[int] = []

        def count(number: int, completion: Completion) -> None:
            if arrived is not None:
                arrived(number, completion)
            answered.append(number)
            self._events.put(None)

        if leader is not None:
            work = leader.loop.submit(leader.pool.generate(requests, count, oldest_version=self._version))
            work.add_done_callback(lambda _: self._events.put(None))

        def collect(progress: Progress | None = None, *, stops: bool = False) -> list[list[Completion]]:
            done: list[Completion] = []
            if leader is not None:
                done = self._collect(leader, work, answered, progress, stops)
            else:
                self._follow(_RESPONSES)
            return self._scatter(done, params.n, wanted)

        return collect

    def _collect(
        self,
        leader: Leader,
        work: Future[list[Completion]],
        answered: Sequence[int],
        progress: Progress | None,
        stops: bool,
    ) -> list[Completion]:
        """Wait for the completions. Meanwhile, send the current weights to servers that return."""
        reported = 0
        with self._leading(), self._control.waiting(_RESPONSES, stops=stops) as wait:
            while True:
                ended, count = work.done(), len(answered)
                if progress is not None and count > reported:
                    progress(count - reported)
                    reported = count
                if ended:
                    break
                try:
                    wait.check()
                except StopRequested:
                    self._control.broadcast("stop")
                    raise
                try:
                    event = self._events.get(timeout=SLICE)
                except Empty:
                    continue
                if event is not None and not event[1].done():
                    server, admitted = event
                    same = self._update([server]) is None
                    self._enter(MemoryPhase.SERVERS)
                    leader.loop.run(_answer(admitted, same))
            completions = work.result()
            self._control.broadcast("done")
        return completions

    async def _admit(self, server: Server) -> bool:
        """Send the current weights to a returning server; return False on failure. Called by the pool."""
        admitted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._events.put((server, admitted))
        return await admitted

    def _scatter(self, done: Sequence[Completion], samples: int, wanted: range) -> list[list[Completion]]:
        """Send the first rank of each replica the completions of its prompts; others get an empty list."""
        groups = self.groups
        if not groups.tp.rank() == groups.cp.rank() == groups.pp.rank() == 0:
            return []
        shares = [
            [c for i in share for c in done[i * samples : (i + 1) * samples]]
            for share in gather_lists([wanted], group=groups.dp)
        ]
        mine = scatter_completions(shares, group=groups.dp)
        return [mine[i : i + samples] for i in range(0, len(mine), samples)]

    def _follow(self, what: str) -> None:
        """Follow the first rank's instructions until it is done. For all other ranks."""
        while (message := self._control.receive(what)) != "done":
            if message == "stop":
                raise StopRequested(f"a stop was requested during the wait for {what}")
            if message == "score":
                self.trainer.score(self.canary_sequences)
            elif message.startswith(_PHASE):
                self._take(MemoryPhase(message.removeprefix(_PHASE)))
            else:
                for _ in self._tensors(message)():
                    pass

    def rest(self) -> None:
        """Make servers on the trainer's GPUs release their memory. Collective. Raises ``TrainingError`` on
        every rank if a server does not."""
        self._switch_to(MemoryPhase.TRAINER)

    def _switch_to(self, phase: MemoryPhase) -> None:
        """Switch to a phase on all ranks. Collective."""
        if self.memory is None or self._phase is phase:
            return
        if self.leader is None:
            self._follow(f"memory phase {phase.value!r}")
            return
        with self._leading():
            self._enter(phase)
            self._control.broadcast("done")

    def _enter(self, phase: MemoryPhase, servers: Sequence[Server] = ()) -> None:
        """Begin a phase on the first rank; the others follow. Memory is released before any is allocated.
        ``servers`` load their weights in phase ``UPDATE``; raises ``ServerLost`` if one does not."""
        if self.memory is None or (self._phase is phase and phase is not MemoryPhase.UPDATE):
            return
        assert self.leader is not None
        loop, pool = self.leader.loop, self.leader.pool
        began = time.perf_counter()
        if phase is not MemoryPhase.SERVERS:
            loop.run(memory_phases.sleep(loop.run(pool.reachable())))
        self._control.broadcast(f"{_PHASE}{phase.value}")
        self._take(phase)
        if phase is MemoryPhase.SERVERS:
            loop.run(memory_phases.wake(loop.run(pool.reachable())))
        elif phase is MemoryPhase.UPDATE:
            loop.run(memory_phases.wake_weights(servers))
        self._phase_seconds += time.perf_counter() - began

    def _take(self, phase: MemoryPhase) -> None:
        """Release and allocate this rank's memory, and wait until all ranks have done so. Collective."""
        assert self.memory is not None
        self._phase = phase
        self.memory.hold(weights=phase is not MemoryPhase.SERVERS, rest=phase is MemoryPhase.TRAINER)
        self._control.barrier(f"the memory of all ranks for memory phase {phase.value!r}")

    def update_weights(self, version: int) -> None:
        """Send the trainer's weights to every server and verify them there. Collective.

        A server on which this fails stays out of rotation, and is tried again while there is work.

        Raises:
            TrainingError: on every rank, if a server has other weights than the trainer, or the update failed
                on all reachable servers.
            InputError: on every rank, if all servers refused, as with a wrong key.
        """
        self._version = version
        if self.leader is None:
            self._follow("the weight update of the servers")
            return
        with self._leading():
            self._update_all(self.leader.loop, self.leader.pool)
            self._control.broadcast("done")

    def _update_all(self, loop: Loop, pool: Pool) -> None:
        for _ in range(ATTEMPTS):
            servers = loop.run(pool.reachable())
            problem = self._update(servers) if servers else None
            if problem is None:
                break
            if len(loop.run(pool.reachable())) < len(servers):
                continue  # with the remaining servers
            # One failing server makes the joint update fail, so update each server separately.
            servers = [server for server in servers if self._update([server]) is None]
            if servers:
                break
        else:
            if isinstance(problem, InputError):  # such as a wrong key
                raise problem
            raise TrainingError(
                f"the weight update to version {self._version} failed {ATTEMPTS} times: {problem}"
            )
        loop.run(pool.serve(servers))

    def _update(self, servers: Sequence[Server]) -> Exception | None:
        """Send and verify the weights, together with the other ranks. Return the error if that failed; raise
        ``WrongWeights`` if a server has other weights afterwards."""
        assert self.leader is not None
        loop, sender = self.leader.loop, self.leader.sender
        try:
            self._enter(MemoryPhase.UPDATE, servers)
        except ServerLost as error:
            return error
        self._control.broadcast("score")
        want = self.trainer.score(self.canary_sequences)
        assert want is not None
        if self.trainer.base is not None and not self._base:
            for _ in proof.with_checksums(self._gather("base"), self._base):
                pass
        mine = dict(self._base)
        tensors = proof.with_checksums(self._gather("tensors"), mine)
        problem = send_weights.send_weights(servers, sender, loop, tensors, self._version)
        if problem is not None:
            return problem
        dtypes: dict[str, set[str]] = {}
        try:  # before they serve again
            proofs = loop.run(proof.prove_all(servers, mine, dtypes))
        except Exception as error:
            return error
        for server, (same, text) in zip(servers, proofs, strict=True):
            if same is False:
                raise proof.WrongWeights(server.url, self._version, text)
        self._enter(MemoryPhase.SERVERS)
        try:
            loop.run(send_weights.resume(servers))
            scores = loop.run(proof.ask_scores(servers, self.canary_sequences))
        except Exception as error:
            return error
        self._proven = all(same for same, _ in proofs)
        if self._proven and isinstance(sender, send_weights.BroadcastSender):
            sender.changes.narrow(dtypes)
        gaps = [(got - torch.cat(want)).abs() for got in scores]
        self._canary_error = max(gap.mean().item() for gap in gaps)
        if self.tolerance is None:
            self.tolerance = proof.tolerance(self._canary_error if self._proven else 0.0, self.dtype)
        for server, gap, (_, text) in zip(servers, gaps, proofs, strict=True):
            if not gap.mean().item() <= self.tolerance:
                how = (
                    f"log-probs of {gap.numel()} canary tokens differ by {gap.mean():.3g} nats on average, "
                    f"by up to {gap.max():.3g}; {self.tolerance:.3g} is allowed\n{text}"
                )
                raise proof.WrongWeights(server.url, self._version, how)
        return None

    def _gather(self, what: str) -> Iterator[tuple[str, Tensor]]:
        """Yield weights gathered from all ranks. The others start when the first tensor is requested."""
        self._control.broadcast(what)
        yield from self._tensors(what)()

    def _tensors(self, what: str) -> Callable[[], Iterator[tuple[str, Tensor]]]:
        named = {"tensors": self.trainer.tensors, "base": self.trainer.base}[what]
        assert named is not None
        return named

    @contextmanager
    def _leading(self) -> Iterator[None]:
        """Report a failure on this rank to the others, wherever they wait."""
        try:
            yield
        except StopRequested:  # the others know
            raise
        except Exception as error:
            self._control.fail(error)
            raise

    def metrics(self) -> dict[str, float]:
        if self.leader is None:
            return {}
        switching = {} if self.memory is None else {"rollout/memory_phases_seconds": self._phase_seconds}
        self._phase_seconds = 0.0
        return switching | {
            "rollout/canary_abs_diff": self._canary_error,
            "rollout/weights_proven": float(self._proven),
            "rollout/canary_tolerance": math.nan if self.tolerance is None else self.tolerance,
            "rollout/sent_bytes": float(self.leader.sender.sent_bytes),
            "rollout/servers": float(len(self.leader.pool.live())),
            **{f"rollout/ended_{reason}": float(n) for reason, n in self.leader.pool.ended().items()},
        }

    def close(self) -> None:
        """Disconnect from servers and groups, and drop open requests."""
        if self.leader is not None:
            self.leader.sender.close()
            # Before the client closes, as a request that is connecting would keep its connection.
            self.leader.loop.cancel()
            self.leader.loop.run(self.leader.http.aclose())
            self.leader.loop.close()


async def _answer(admitted: asyncio.Future[bool], same: bool) -> None:
    if not admitted.done():  # else the batch failed and cancelled its probes
        admitted.set_result(same)
