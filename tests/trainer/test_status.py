"""A run seen from outside: who is at work, who is silent, who is slow."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from launch import why
from megatron_fspo.cli import main
from megatron_fspo.job.lock import FolderLock
from megatron_fspo.job.rank_status import Activity, status_file, status_writer
from megatron_fspo.job.run_folder import RunFolder
from megatron_fspo.lab.status import examine, render
from megatron_fspo.parallel.control import Control
from megatron_fspo.trainer.metrics import Pace, lines, ratios
from runs import faulty, rows

PLAIN = "--parallel.tensor 1 --parallel.sequence false --evaluation.every 0 --checkpoint.every 2".split()


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The folder of a run of three steps with a slow rank 1; its output; its status within step 3."""
    folder = tmp_path_factory.mktemp("slow")
    fault = ["slow_rank", str(folder / "slow"), str(folder / "status")]
    result = faulty(folder, "slow", fault, *PLAIN, "--run.steps", "3")
    assert result.returncode == 0, why(result.stderr)
    return folder / "slow", result.stdout, (folder / "status").read_text()


@pytest.mark.slow
def test_a_slow_rank_is_named(slow: tuple[Path, str, str]) -> None:
    folder, output, _ = slow
    found = rows(folder.parent, "slow")
    assert [row["perf/slowest_rank"] for row in found] == [1, 1, 1]
    assert all(1.3 < row["perf/slowest_rank_over_median"] < 10 for row in found)
    (line,) = (line for line in output.splitlines() if "times the median" in line)
    assert line.startswith(f"step 3: rank 1 on {socket.gethostname()} took ") and "for 3 steps" in line


@pytest.mark.slow
def test_a_run_under_way_and_at_its_end(
    slow: tuple[Path, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _, within = slow
    assert f"at work: process {examine(folder).ranks[0].status.process} on" in within  # type: ignore[union-attr]
    assert "2 of 3 done" in within and "step_000002" in within and "reward" in within
    assert "ranks 0-1" in within and "update, step 3" in within
    assert main(["status", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "finished" in out and "3 of 3 done" in out and "ended, step 3" in out
    assert main(["status", "--json", str(folder)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["rank"] for one in found["ranks"]] == [0, 1] and found["checkpoint"] == "step_000003"
    assert found["job"] is None and found["problems"] == [] and found["metrics"]["step"] == 3


def make_run(folder: Path) -> Path:
    (folder / "checkpoints/step_000010").mkdir(parents=True)
    (folder / "config.toml").write_text("[run]\nsteps = 30\n")
    (folder / "metrics.jsonl").write_text('{"step": 11, "critic/rewards/mean": 0.5}\n')
    return folder


def write(folder: Path, job: str, rank: int, phase: str, waits: str = "", size: int = 4) -> None:
    """The file of a rank of a job."""
    activity = Activity()
    activity.step, activity.phase = 12, phase
    status_writer(folder, job, activity, lambda: waits, rank=rank, size=size)()


def test_ranks_that_do_the_same_share_a_line_and_the_silent_one_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    lock = FolderLock(folder)
    for rank in (0, 1):
        write(folder, lock.owner.nonce, rank, "update")
    write(folder, lock.owner.nonce, 2, "sampling", "responses of the servers")
    assert "rank 3      no sign of life yet; not heard of\n" in f"{render(examine(folder))}\n"
    assert main(["status", str(folder)]) == 1
    write(folder, lock.owner.nonce, 3, "old pass")
    assert main(["status", str(folder)]) == 0
    out = render(examine(folder))
    assert "ranks 0-1   update, step 12\n" in out and "rank 3      old pass, step 12" in out
    assert "rank 2      sampling, waiting for responses of the servers, step 12\n" in out
    assert "11 of 30 done" in out and "step_000010" in out and "reward 0.500" in out

    past = time.time() - 95
    os.utime(status_file(folder, 3), (past, past))
    here = f"not heard of for 95 s ({socket.gethostname()}, process {os.getpid()})"
    assert f"rank 3      old pass, step 12; {here}" in render(examine(folder))
    for rank in range(4):
        write(folder, lock.owner.nonce, rank, "ended")
    assert examine(folder).problems == []
    lock.release()
    assert "no job is at work here" in render(examine(folder))


def test_a_rank_without_progress_is_stuck_also_when_it_waits(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    lock = FolderLock(folder)
    for rank, waits in enumerate(("", "grades")):
        write(folder, lock.owner.nonce, rank, "update", waits, size=2)
        path = status_file(folder, rank)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"progress": time.time() - 2000}))
    first, second = examine(folder).problems
    assert first.startswith("rank 0: no progress for ") and second.startswith("rank 1: no progress for ")
    assert "waiting for grades" in render(examine(folder))
    lock.release()


def test_one_thread_writes_lock_and_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last word of a rank stays; a smaller job removes the files of the ranks beyond it."""
    monkeypatch.setattr("megatron_fspo.job.lock.REFRESH_SECONDS", 0.02)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    folder, threads = make_run(tmp_path / "run"), threading.active_count()
    for rank in range(3):
        write(folder, "before", rank, "update")
    lock, control = FolderLock(folder), Control()
    run = RunFolder(folder, control, [], lock, lock.owner.nonce)
    run.report(Activity())
    assert [path.name for path in (folder / "ranks").iterdir()] == ["00000.json"]
    assert threading.active_count() == threads + 1
    with control.waiting("grades"):
        for path, text in ((folder / "job.lock", ""), (status_file(folder, 0), '"waits": "grades"')):
            os.utime(path, (1, 1))
            deadline = time.monotonic() + 20
            while path.stat().st_mtime < 2 or text not in path.read_text():
                assert time.monotonic() < deadline
                time.sleep(0.01)
    run.close("failed")
    assert threading.active_count() == threads
    assert examine(folder).problems == ["rank 0: its error is in the output of the job"]
    lock.release()


def test_a_job_that_is_gone(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    lock = FolderLock(folder)
    gone: dict[str, Any] = json.loads((folder / "job.lock").read_text()) | {"process": 2**22 + 1}
    lock.release()
    (folder / "job.lock").write_text(json.dumps(gone))
    assert f"gone: process {2**22 + 1} on" in render(examine(folder)) and examine(folder).problems


def test_no_such_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"megatron-fspo: there is no run in {tmp_path}/none\n"


def test_ranks_are_compared_within_their_pipeline_stage() -> None:
    paces = [
        Pace(seconds, stage, "node-0", {}) for seconds, stage in ((1.0, 0), (1.5, 0), (3.0, 1), (3.0, 1))
    ]
    assert ratios(paces) == [1.0, 1.5, 1.0, 1.0]
    assert ratios([Pace(0.0, 0, "node-0", {})] * 2) == [1.0, 1.0]


def test_slow_ranks_are_named_by_host() -> None:
    paces = [Pace(1.0, 0, f"node-{rank // 4}", {}) for rank in range(8)]
    found = lines({0: 2, 4: 3, 5: 4, 7: 3}, [1.0] * 4 + [1.4, 1.5, 1.0, 1.3], paces)
    assert list(found) == ["node-1"]
    assert found["node-1"].startswith("ranks 4-5, 7 on node-1 took 1.50 times")
    assert "for 3 steps" in found["node-1"]
