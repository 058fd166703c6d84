"""Ranks that are started again in the store of those before them: nothing of theirs is taken for new."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import HashStore

from launch import torchrun
from megatron_fspo.errors import TrainingError
from megatron_fspo.job import start_id
from megatron_fspo.job.start_id import PREFIX, agree_on_start_id


def start(store: HashStore, delays: list[float], seconds: float = 20) -> list[str]:
    """The names that ranks come to, which begin after so many seconds."""

    def one(rank: int) -> str:
        time.sleep(delays[rank])
        return agree_on_start_id(store, rank, len(delays), seconds=seconds)

    with ThreadPoolExecutor(len(delays)) as pool:
        ranks: list[Future[str]] = [pool.submit(one, rank) for rank in range(len(delays))]
        return [rank.result() for rank in ranks]


@pytest.mark.parametrize("delays", [[0.0], [0, 0, 0, 0], [0.2, 0, 0, 0.1], [0, 0.3, 0, 0.1]])
def test_every_start_has_a_name_of_its_own(delays: list[float]) -> None:
    store = HashStore()
    names = [start(store, delays) for _ in range(3)]
    assert all(len(set(one)) == 1 for one in names)
    assert len({one[0] for one in names}) == 3


def test_a_start_that_was_ended_half_way_leaves_nothing_that_counts() -> None:
    """Some ranks had a name, others only a token, when torchrun ended them all."""
    store = HashStore()
    with pytest.raises(TrainingError):
        start(store, [0, 0, 0.8], seconds=0.4)
    store.set(f"{PREFIX}/token/2", "gone")
    assert len(set(start(store, [0, 0.1, 0.2]))) == 1


def test_who_does_not_come_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start_id, "SAY_AFTER", 0.1)
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(agree_on_start_id, store, rank, 9, seconds=0.5) for rank in (0, 1)]
        with pytest.raises(TrainingError, match=r"waited 0\.5 s for the ranks to start; missing: rank 2, "):
            ranks[0].result()
    assert "of rank 2, rank 3, rank 4, rank 5, rank 6 and 2 more" in capsys.readouterr().err
    with pytest.raises(TrainingError, match="missing: rank 0"):
        agree_on_start_id(store, 3, 9, seconds=0.1)


PROGRAM = """
import os, sys
from pathlib import Path
from megatron_fspo.errors import InputError
from megatron_fspo.mcore import leave_uncompiled
leave_uncompiled()
from megatron_fspo.mcore.machine.backend import choose_backend
from megatron_fspo.mcore.machine.startup import job, join
with job():
    join(choose_backend("cpu")).barrier("a meeting")
    tries = Path(sys.argv[1], os.environ["RANK"])
    with tries.open("a") as file:
        file.write("x")
    if os.environ["RANK"] == "1" and len(tries.read_text()) < 2:
        raise InputError("a disk that is full, say")
    join(choose_backend("cpu")).barrier("another meeting")
"""


@pytest.mark.slow
def test_torchrun_starts_ranks_again_that_told_each_other_of_a_failure(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["--max-restarts", "1", str(tmp_path / "program.py"), str(tmp_path)]
    done = torchrun(words, nproc=2)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "1").read_text() == "xx"
