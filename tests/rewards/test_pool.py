"""Worker processes: what kills them, what they may not do, and that none is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pool_tasks
import psutil
import pytest
from processes_of import gone, workers

from launch import REPO, environment
from megatron_fspo.rewards.pool import KillablePool, Unfinished, WorkerError

LIMIT = 3.0  # seconds: enough for what ends by itself, on a machine that does much else
PROGRAM = Path(__file__).with_name("pool_program.py")


def make(workers: int = 2, seconds: float = 60.0) -> KillablePool:
    return KillablePool("pool_tasks:do", workers=workers, seconds=seconds, memory_gb=0.25)


@pytest.fixture(scope="module")
def pool() -> Iterator[KillablePool]:
    """One pool for the tests that do not end it, with little time for each task."""
    with closing(make(seconds=LIMIT)) as pool:
        yield pool


def outcome(future: Future[Any]) -> Any:
    """What came of it within 30 seconds: the result, or the type of the error."""
    error = future.exception(timeout=30)
    return future.result() if error is None else type(error)


@pytest.mark.parametrize("task", ["loop_in_c", "ignore_signals"])
def test_a_task_over_its_time_is_killed_alone(pool: KillablePool, task: str) -> None:
    """The other worker goes on meanwhile."""
    begun = time.monotonic()
    slow = pool.submit(task)
    quick = [pool.submit("echo", i) for i in range(100)]
    assert [outcome(future) for future in quick] == list(range(100))
    assert not slow.done(), "nobody waited for it"
    assert outcome(slow) is Unfinished
    assert LIMIT - 0.1 < time.monotonic() - begun < LIMIT + 5


@pytest.mark.parametrize("task", ["crash", "exit", "too_much_memory_in_c"])
def test_a_worker_that_dies_is_replaced(pool: KillablePool, task: str) -> None:
    assert outcome(pool.submit(task)) is Unfinished
    assert outcome(pool.submit("echo", 1)) == 1


def test_memory_has_a_limit(pool: KillablePool) -> None:
    assert outcome(pool.submit("memory", 2**27)) == 2**27
    assert outcome(pool.submit("memory", 2**29)) is Unfinished
    assert outcome(pool.submit("memory", 2**27)) == 2**27


def test_cpu_time_has_a_limit_that_needs_no_pool() -> None:
    """The pool would wait for ten minutes; the worker dies of its own limit."""
    with closing(make(workers=1, seconds=600.0)) as pool:
        assert isinstance(pool.submit("burn", 0.1).exception(timeout=120), Unfinished)


@pytest.mark.parametrize("task", pool_tasks.FORBIDDEN)
def test_what_a_worker_may_not_do(pool: KillablePool, task: str, tmp_path: Path) -> None:
    error = pool.submit(task, str(tmp_path / "file")).exception(timeout=30)
    assert isinstance(error, WorkerError) and str(error).startswith(("PermissionError", "OSError"))
    assert list(tmp_path.iterdir()) == []


def test_a_worker_has_what_it_needs_and_nothing_else(
    pool: KillablePool, capfd: pytest.CaptureFixture
) -> None:
    names = outcome(pool.submit("modules"))
    assert "megatron_fspo.rewards.worker" in names
    heavy = {"torch", "megatron", "transformers", "pydantic", "httpx", "sympy", "numpy"}
    assert heavy.intersection(names) == set()
    assert outcome(pool.submit("shout")) is None
    assert capfd.readouterr() == ("", ""), "what model text makes a library say is not for the log"


def test_an_error_of_the_function_is_told(pool: KillablePool) -> None:
    error = pool.submit("fail").exception(timeout=30)
    assert isinstance(error, WorkerError) and str(error) == "ZeroDivisionError: division by zero"
    assert "in _fail" in error.__notes__[0]
    for task in ("returns_object", "returns_nothing_json_has"):
        error = pool.submit(task).exception(timeout=30)
        assert isinstance(error, WorkerError) and str(error).startswith("TypeError")


def test_what_a_worker_says_beside_the_answer_ends_it(pool: KillablePool) -> None:
    """Text that got itself evaluated could write to the socket: that is no answer to any task."""
    assert outcome(pool.submit("forges")) is Unfinished
    assert [outcome(pool.submit("echo", i)) for i in range(5)] == list(range(5))


def test_a_task_larger_than_the_socket_holds() -> None:
    text, others = "x" * 2_000_000, workers()
    with closing(make(workers=1, seconds=LIMIT)) as pool:
        assert outcome(pool.submit("length", text)) == len(text)
        for worker in workers():
            if worker not in others:
                worker.suspend()
        assert outcome(pool.submit("length", text)) is Unfinished
        assert outcome(pool.submit("length", text)) == len(text)


def test_a_worker_that_holds_much_is_replaced() -> None:
    others = workers()
    with closing(make(workers=1)) as pool:
        (first,) = (one for one in workers() if one not in others)
        assert outcome(pool.submit("keep", 2**26)) == 2**26
        assert first in workers()
        assert outcome(pool.submit("keep", 2**27)) == 2**27
        assert outcome(pool.submit("keep", 1)) == 1
        assert first not in workers()


def test_idle_workers_that_die_break_nothing(pool: KillablePool) -> None:
    for rounds in range(2):
        for worker in workers():
            worker.kill()
        if rounds:
            time.sleep(0.3)  # it has seen it
        assert [outcome(pool.submit("echo", i)) for i in range(5)] == list(range(5))


def test_tasks_survive_the_death_of_all_workers(pool: KillablePool) -> None:
    """Those that wait, and those that run: they are tried once more."""
    futures = [pool.submit("sleep", 0.01) for _ in range(200)]
    time.sleep(0.1)
    for worker in workers():
        worker.kill()
    assert set(map(outcome, futures)) == {None}


def test_closing_cancels_and_leaves_nothing() -> None:
    """Of workers that are busy, and of one that is stopped."""
    before = workers()
    pool = make(workers=3)
    mine = [one for one in workers() if one not in before]
    child = psutil.Process(outcome(pool.submit("fork_in_c")))
    busy = [pool.submit(task) for task in ("loop_in_c", "ignore_signals", "sleep")]
    waiting = [pool.submit("echo", "x" * 1000) for _ in range(500)]  # more than the pipe holds
    time.sleep(0.2)
    mine[0].suspend()
    begun = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - begun < 5
    assert all(future.cancelled() for future in [*busy, *waiting])
    assert gone([*mine, child]) and workers() == before
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit("echo", 1)


def test_a_worker_that_does_not_come_up_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before = workers()
    with pytest.raises(RuntimeError, match=r"do not start: .*No module named .no_such_module"):
        KillablePool("no_such_module:do", workers=2, seconds=1.0, memory_gb=0.25)
    monkeypatch.setattr("megatron_fspo.rewards.pool.START_SECONDS", 0.001)
    with pytest.raises(RuntimeError, match="worker processes do not start: TimeoutError"):
        make()
    assert workers() == before


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill -9", "exception", "exit"])
def test_no_worker_outlives_the_program(end: str) -> None:
    """One of them is busy, in code that hears no signal."""
    command = [sys.executable, str(PROGRAM), end]
    paths = os.pathsep.join([str(REPO), str(PROGRAM.parent)])
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(
        command, cwd=REPO, env=environment(PYTHONPATH=paths), text=True, **pipes
    ) as program:
        assert program.stdout is not None
        busy = program.stdout.readline()
        processes = psutil.Process(program.pid).children(recursive=True)
        if end == "kill -9":
            program.kill()
        _, errors = program.communicate("\n", timeout=30)
    assert busy == "busy\n"
    assert len(processes) == 2
    assert ("ZeroDivisionError" in errors) == (end == "exception"), errors
    assert gone(processes)
