"""Waiting outside of collectives, on ranks that are threads of this process with a store in memory."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pytest
from torch._C._distributed_c10d import HashStore

from megatron_fspo.errors import InputError, StopRequested, TrainingError
from megatron_fspo.job.control import HeartbeatTimer, JobControl
from megatron_fspo.parallel.control import Control, Timeouts

T = TypeVar("T")

QUICK = Timeouts(wait=20.0, silence=2.0, grace=0.5)
PATIENT = Timeouts(wait=120.0, silence=60.0)
"""Of ranks that all answer, on however busy a machine."""


class Job:
    """Ranks, and which of their processes were ended."""

    def __init__(self, size: int, timeouts: Timeouts) -> None:
        self.store = HashStore()
        self.ended: list[int] = []
        self.ranks = [
            JobControl(
                self.store,
                rank,
                size,
                timeouts,
                end=lambda _, rank=rank: self.ended.append(rank),
                speaks=False,
            )
            for rank in range(size)
        ]

    def run(self, work: Callable[[Control, int], T]) -> list[T | Exception]:
        """On all ranks at once: what each returned or raised."""

        def attempt(rank: int) -> T | Exception:
            try:
                return work(self.ranks[rank], rank)
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(attempt, range(len(self.ranks))))


def wait_long(control: Control, what: str, **more: bool) -> None:
    """Until it is ended."""
    with control.waiting(what, **more) as wait:
        while True:
            time.sleep(0.05)
            wait.check()


@contextmanager
def job(size: int = 3, timeouts: Timeouts = QUICK) -> Iterator[Job]:
    jobs = Job(size, timeouts)
    yield jobs
    jobs.run(lambda control, _: control.close())


def keys(job: Job) -> int:
    """Keys in the store that are not of the heartbeat."""
    return job.store.num_keys() - len(job.ranks) - 2


@pytest.mark.parametrize("seed", range(4))
def test_words_and_meetings_in_any_rhythm(seed: int) -> None:
    """Every rank hears every word in its order, nobody leaves a meeting before all have come, and the store
    is as empty as before."""
    plan = random.Random(seed).choices(["word", "meet", "pair"], k=12)
    came = [0] * 3
    lock = threading.Lock()

    def work(control: Control, rank: int) -> list[str]:
        mood, heard = random.Random(f"{seed} {rank}"), []
        for number, what in enumerate(plan):
            time.sleep(mood.choice([0, 0, 0.01, 0.05]))
            if what == "word" and rank == 0:
                control.broadcast(f"do {number}")
            elif what == "word":
                heard.append(control.receive("a word"))
            elif what == "meet" or rank:
                with lock:
                    came[rank] += 1
                assert control.barrier(f"meeting {number}", None if what == "meet" else [1, 2]) is False
                ranks = range(3) if what == "meet" else (1, 2)
                together = plan[: number + 1]
                wanted = {0: together.count("meet"), 1: together.count("meet") + together.count("pair")}
                assert all(came[other] >= wanted[min(other, 1)] for other in ranks)
        control.barrier("the end")
        return heard

    with job(timeouts=PATIENT) as ranks:
        heard = ranks.run(work)
        words = [f"do {number}" for number, what in enumerate(plan) if what == "word"]
        assert heard == [[], words, words]
        time.sleep(0.1)
        assert keys(ranks) == 0
    assert ranks.store.num_keys() == 0 and not ranks.ended


def test_who_tells_goes_on_when_all_have_heard() -> None:
    def work(control: Control, rank: int) -> float:
        if rank == 0:
            control.broadcast("together")
        else:
            time.sleep(0.4 * rank)
            assert control.receive("a word") == "together"
        return time.monotonic()

    with job() as ranks:
        told, first, last = ranks.run(work)
        assert told >= last > first + 0.2  # type: ignore[operator]


def test_alone() -> None:
    control = Control()
    control.broadcast("word")
    assert control.barrier("nobody") is False
    with control.waiting("nothing") as wait:
        wait.check()
    control.fail(ValueError("x"))
    with pytest.raises(RuntimeError, match=r"receive\(\)"):
        control.receive("a word")
    control.request_stop()
    assert control.barrier("nobody") is True
    with pytest.raises(StopRequested, match="wait for rain"), control.waiting("rain", stops=True) as wait:
        wait.check()
    with pytest.raises(TrainingError, match=r"waited 0\.05 s for rain$"):
        with control.waiting("rain", seconds=0.05) as wait:
            time.sleep(0.1)
            wait.check()
    impatient = Control(Timeouts(wait=0.01))
    with pytest.raises(TrainingError, match=r"waited 0\.01 s for rain \(parallel\.wait_seconds\)"):
        with impatient.waiting("rain") as wait:
            time.sleep(0.1)
            wait.check()


def test_who_does_not_come_is_named() -> None:
    def work(control: Control, rank: int) -> bool:
        if rank == 1:
            time.sleep(2)
            return True
        return control.barrier("the grades", seconds=1)

    with job() as ranks:
        first, _, last = ranks.run(work)
        for error in (first, last):
            assert isinstance(error, TrainingError)
            assert "): waited 1 s for the grades; missing: rank 1 (" in str(error)
        assert str(first) == str(last)


@pytest.mark.parametrize(
    ("error", "text"),
    [(InputError("reward.name = 3"), "): reward.name = 3"), (KeyError("x"), "): KeyError: 'x'")],
)
def test_an_error_of_one_ends_the_waits_of_all(error: Exception, text: str) -> None:
    def work(control: Control, rank: int) -> None:
        if rank == 2:
            time.sleep(0.2)
            control.fail(error)
            control.fail(RuntimeError("another"))  # the first counts
        elif rank == 1:
            control.barrier("the grades")
        else:
            wait_long(control, "a server")

    with job() as ranks:
        began = time.monotonic()
        first, second, _ = ranks.run(work)
        assert time.monotonic() - began < 2
        assert str(first) == str(second)
        assert str(first).startswith("rank 2 (") and str(first).endswith(text)
        # None of the processes ends by itself; so they are ended.
        deadline = time.monotonic() + 5
        while len(ranks.ended) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert sorted(ranks.ended) == [0, 1, 2]


def stand_still(control: JobControl) -> None:
    """The thread ends, as with its process."""
    control._leave = lambda: None  # type: ignore[method-assign]
    control._requests.put(None)


@pytest.mark.parametrize("waits", [False, True])
def test_a_silent_rank_is_named_whether_or_not_another_waits(
    waits: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Who is in a collective cannot say that it waits. The first rank says it for itself then."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    timeouts = Timeouts(silence=1.0, grace=0.2)
    with job(timeouts=timeouts) as ranks:
        ranks.run(lambda control, _: control.barrier("the start"))
        time.sleep(2 * timeouts.beat)  # until all have said that they wait no more
        began = time.monotonic()
        stand_still(ranks.ranks[1])
        if waits:
            with pytest.raises(TrainingError, match="rank 1 "):
                ranks.ranks[2].barrier("the grades")
        while len(ranks.ended) < 2 and time.monotonic() < began + 10:
            time.sleep(0.05)
        assert sorted(ranks.ended) == [0, 2]
        assert time.monotonic() - began < 1.2 + 2 * timeouts.beat + 2
        problems = {ranks.ranks[rank].problem for rank in (0, 2)}
        assert len(problems) == 1
        problem = str(problems.pop())
        assert re.match(r"rank 1 \(\S+, local rank 3, process \d+\) sent no heartbeat for 1 s", problem)
        assert ("rank 2 (" in problem and "waited for the grades" in problem) == waits
        assert capfd.readouterr().err.count("rank 0: rank 1 (") == 1


def test_who_was_stopped_itself_has_not_seen_silence() -> None:
    """All processes of a starved machine stand still together; who wakes up first must not blame the next."""
    silence = HeartbeatTimer(QUICK)
    assert silence.look("a beat") == 0
    silence._looked -= 1000
    assert 0 < silence.look("a beat") <= QUICK.silence / 2
    assert silence.look("the next beat") == 0


@pytest.mark.parametrize("gone", [False, True])
def test_a_store_that_does_not_answer_or_is_gone(gone: bool) -> None:
    with job(2) as ranks:
        answers = threading.Event()

        def broken() -> bool | None:
            if gone:
                raise ConnectionError("Connection was likely closed")
            return answers.wait() or None

        ranks.ranks[0]._until(broken)
        text = (
            r"is gone, .*: Connection was likely closed" if gone else r"has not answered for [23] s: is the"
        )
        with pytest.raises(TrainingError, match=text):
            ranks.ranks[0].barrier("the grades")
        answers.set()
        time.sleep(1)
        assert 0 in ranks.ended and (1 not in ranks.ended or not gone)


def test_a_stop_is_everybodys_and_decided_alike() -> None:
    def work(control: Control, rank: int) -> list[bool]:
        stops = [control.barrier("step 1")]
        if rank == 1:
            control.request_stop()
        return [*stops, control.barrier("step 2"), control.barrier("step 3")]

    with job() as ranks:
        assert ranks.run(work) == [[False, True, True]] * 3
        ranks.run(lambda control, _: time.sleep(0.6))
        assert all(control.stop_requested for control in ranks.ranks)


def test_a_stop_on_another_rank_ends_a_wait_that_may_end() -> None:
    """The first rank waits for servers, is told of the stop, and tells the others."""

    def work(control: Control, rank: int) -> str:
        if rank == 2:
            control.request_stop()
        if rank:
            return control.receive("the responses")
        with pytest.raises(StopRequested):
            wait_long(control, "the servers", stops=True)
        control.broadcast("stop")
        return "stop"

    with job() as ranks:
        began = time.monotonic()
        assert ranks.run(work) == ["stop"] * 3
        assert time.monotonic() - began < 3
