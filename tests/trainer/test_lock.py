"""The lock of a run's folder: who holds it, who is gone, who takes over."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import combinations_with_replacement
from pathlib import Path

import pytest

from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.job import lock
from megatron_fspo.job.lock import LOCK, FolderLock, Owner, check_not_held, read_owner

ELSEWHERE = replace(Owner.this_process(), host="node-7", machine="another boot", process=4711, job="99")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "REFRESH_SECONDS", 0.02)
    monkeypatch.setattr(lock, "POLL_SECONDS", 0.02)


def write(folder: Path, owner: Owner, *, age: float = 0.0) -> None:
    """A lock as ``owner`` left it, ``age`` seconds ago on the file system's clock."""
    folder.mkdir(exist_ok=True)
    path = folder / LOCK
    path.write_text(json.dumps(asdict(owner)))
    seconds = path.stat().st_mtime - age
    os.utime(path, (seconds, seconds))


def ended_process() -> Owner:
    """Of this machine."""
    found = subprocess.Popen([sys.executable, "-c", "pass"])
    started = Path(f"/proc/{found.pid}/stat").read_text().rpartition(")")[2].split()[19]
    found.wait()
    return replace(Owner.this_process(), process=found.pid, started=started)


def test_one_holds_it_and_the_other_is_refused(tmp_path: Path) -> None:
    held = FolderLock(tmp_path / "one")
    here = f"/one is in use by process {os.getpid()} on {socket.gethostname()}"
    with pytest.raises(InputError, match=f"{here}.*run.name"):
        FolderLock(tmp_path / "one")
    with pytest.raises(InputError, match="is in use by process"):
        check_not_held(tmp_path / "one")
    check_not_held(tmp_path / "one", held.owner)
    held.check()
    held.release()
    check_not_held(tmp_path / "one")


def test_a_refused_run_leaves_no_folder_and_one_that_wrote_leaves_no_lock(tmp_path: Path) -> None:
    FolderLock(tmp_path / "runs/one").release()
    assert list(tmp_path.iterdir()) == []
    held = FolderLock(tmp_path / "runs/one")
    (tmp_path / "runs/one/config.toml").touch()
    held.release()
    assert [path.name for path in (tmp_path / "runs/one").iterdir()] == ["config.toml"]
    with pytest.raises(InputError, match=r"run\.folder: .*/two cannot be written: Not a directory"):
        FolderLock(tmp_path / "runs/one/config.toml/two")


@pytest.mark.parametrize(
    "owner", [ended_process, lambda: replace(Owner.this_process(), started="12")], ids=["ended", "its number"]
)
def test_a_process_that_has_ended_is_taken_over_at_once(tmp_path: Path, owner: Callable[[], Owner]) -> None:
    gone = owner()
    write(tmp_path, gone)
    lines: list[str] = []
    held = FolderLock(tmp_path, say=lines.append)
    assert lines == [f"{tmp_path / LOCK}: took over the lock of {gone}, which is gone"]
    assert read_owner(tmp_path) == held.owner
    held.release()
    assert list(tmp_path.iterdir()) == []


def test_another_machine_that_refreshes_is_left_alone(tmp_path: Path, quick: None) -> None:
    write(tmp_path, ELSEWHERE, age=60)
    lines: list[str] = []
    with pytest.raises(InputError, match="in use by process 4711 on node-7, job 99, since"):
        FolderLock(tmp_path, pause=lambda: os.utime(tmp_path / LOCK), say=lines.append)
    assert len(lines) == 1 and "for 60 s whether it lives" in lines[0]
    assert read_owner(tmp_path) == ELSEWHERE


@pytest.mark.parametrize(("age", "lines"), [(lock.STALE_SECONDS + 1, 1), (lock.STALE_SECONDS - 0.5, 2)])
def test_another_machine_that_does_not_is_taken_over(
    tmp_path: Path, quick: None, age: float, lines: int
) -> None:
    write(tmp_path, ELSEWHERE, age=age)
    said: list[str] = []
    held = FolderLock(tmp_path, say=said.append)
    assert len(said) == lines and "took over the lock of process 4711 on node-7" in said[-1]
    held.release()


def test_a_lock_that_cannot_be_read_is_as_old_as_it_is(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    os.utime(tmp_path / LOCK, (1, 1))
    said: list[str] = []
    FolderLock(tmp_path, say=said.append).release()
    assert said[-1].endswith("took over the lock of an unknown process, which is gone")


def test_a_wait_for_another_may_be_ended(tmp_path: Path, quick: None) -> None:
    write(tmp_path, ELSEWHERE)

    def pause() -> None:
        raise TrainingError("rank 3 is gone")

    with pytest.raises(TrainingError, match="rank 3 is gone"):
        FolderLock(tmp_path, pause=pause)
    assert read_owner(tmp_path) == ELSEWHERE


STEPS = 17
most: list[int] = []


@pytest.mark.parametrize("suspended", [False, True], ids=["slow", "thought gone"])
@pytest.mark.parametrize("pauses", [*combinations_with_replacement(range(5, STEPS), 2)])
def test_of_three_that_take_over_one_holds_it_whenever_another_pauses(
    pauses: tuple[int, int], suspended: bool, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pauses before two of its looks at, or changes of, the folder; another comes in each pause."""
    monkeypatch.setattr(lock, "STALE_SECONDS", 0.1)
    monkeypatch.setattr(lock, "REFRESH_SECONDS", 60.0)  # so that nobody notices later what was wrong
    write(tmp_path, ended_process())
    held: list[FolderLock] = []
    steps = []

    def try_to_hold() -> None:
        with suppress(InputError):
            held.append(FolderLock(tmp_path, say=lambda line: None))

    def paused(function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **keys: object) -> object:
            if threading.current_thread() is first:
                steps.append(function)
                for _ in range(pauses.count(len(steps) - 1)):
                    other = threading.Thread(target=try_to_hold)
                    other.start()
                    other.join(20)
            return function(*arguments, **keys)

        return call

    def of_this_thread(cls: type[Owner], this: Callable[[], Owner] = Owner.this_process) -> Owner:
        changed = {"machine": "another boot"} if suspended and threading.current_thread() is first else {}
        return replace(this(), **changed)

    for module, name in (
        (os, "open"),
        (Path, "rename"),
        (Path, "replace"),
        (Path, "unlink"),
        (Path, "exists"),
    ):
        monkeypatch.setattr(module, name, paused(getattr(module, name)))
    monkeypatch.setattr(lock, "read_owner", paused(lock.read_owner))
    monkeypatch.setattr(Owner, "this_process", classmethod(of_this_thread))
    first = threading.Thread(target=try_to_hold)
    first.start()
    first.join(60)
    if suspended:  # as its thread does when it goes on
        [one._refresh() for one in held if one.owner.machine == "another boot"]
    assert len([one for one in held if passes(one)]) <= 1
    assert suspended or len(held) == 1
    most.append(len(steps))
    for one in held:
        one._refresh()
        one.release()


def test_that_was_every_step() -> None:
    # How often the first one polls depends on the machine.
    assert not most or sum(steps > STEPS for steps in most) < len(most) / 4


def passes(held: FolderLock) -> bool:
    try:
        held.check()
    except TrainingError:
        return False
    return True


@pytest.mark.parametrize(
    ("other", "problem"), [(ELSEWHERE, "taken over by process 4711 on node-7"), (None, "is gone: was")]
)
def test_an_owner_that_lost_it_stops(tmp_path: Path, quick: None, other: Owner | None, problem: str) -> None:
    held = FolderLock(tmp_path)
    held.check()
    write(tmp_path, other) if other else (tmp_path / LOCK).unlink()
    wait_until(lambda: held._problem is not None)
    with pytest.raises(TrainingError, match=problem):
        held.check()
    held.release()
    assert (tmp_path / LOCK).exists() == (other is not None), "released what is another's"


def wait_until(true: Callable[[], bool]) -> None:
    for _ in range(500):
        if true():
            return
        lock.time.sleep(0.02)
    pytest.fail("nothing happened for 10 s")
