"""Runs whose reward goes wrong: one line, the response in a file, and a checkpoint to go on from."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest

from launch import forked, why
from megatron_fspo.config import Reward
from megatron_fspo.errors import RewardError
from megatron_fspo.parallel.control import Control, Timeouts
from megatron_fspo.rewards import Failure, Grade, Grader
from megatron_fspo.trainer.sampling import _awaited, raise_first
from megatron_fspo.types import Completion, Prompt
from runs import numbers, rows, train_words
from test_log import logged

WORKER = Path(__file__).with_name("reward_worker.py")
# Every rank has prompts of its own, and grades.
STOPPED = Completion(token_ids=(12,), log_probs=(-0.1,), finish_reason="stop", weight_version=0)
DATA_PARALLEL = ("--parallel.tensor", "1", "--parallel.sequence", "false")


def prompt(answer: str, index: int) -> Prompt:
    return Prompt(index=index, token_ids=(10,), text="?", answer=answer, fields={})


def train(folder: Path, name: str, reward: str, *extra: str) -> subprocess.CompletedProcess[str]:
    words = ("--run.steps", "2", "--checkpoint.every", "0", "--reward.name", f"reward_worker:{reward}")
    return forked([str(WORKER), *train_words(folder, name, *words, *extra)[1:]], nproc=2)


@pytest.mark.slow
def test_a_reward_that_raises_ends_in_one_line_and_is_resumed_once_mended(tmp_path: Path) -> None:
    """It raises on the second rank, in step 2; the first one has no fault."""
    extra = (*DATA_PARALLEL, "--evaluation.every", "0")
    failed = train(tmp_path, "run", "raises", *extra)
    assert failed.returncode == 1
    (line,) = failed.stderr.splitlines()
    path = tmp_path / "run/reward_error.json"
    found = json.loads(path.read_text())
    assert line.startswith("megatron-fspo: step 2: reward 'reward_worker:raises' raised TypeError: ")
    assert f"({WORKER}:" in line
    prompt = f"on prompt {found['prompt_index']}, response {found['sample']}"
    assert line.endswith(f"{prompt} (written to {path}); --resume continues after step 1")
    assert found["problem"] in line and found["reward"] == "reward_worker:raises"
    assert found["traceback"][-1].startswith("TypeError: ") and str(WORKER) in "".join(found["traceback"])
    assert found["prompt"] == f"^{found['answer']}=" and found["token_ids"] and found["prompt_token_ids"]
    assert len(found["token_ids"]) == len(found["response"]) + (found["finish_reason"] == "stop")
    assert [row["step"] for row in rows(tmp_path, "run")] == [1]
    assert [x.name for x in (tmp_path / "run/checkpoints").iterdir()] == ["step_000001"]

    for name, resume in (("run", ["--resume"]), ("whole", [])):
        result = train(tmp_path, name, "sound", *extra, *resume)
        assert result.returncode == 0, why(result.stderr)
    assert list(map(numbers, rows(tmp_path, "run"))) == list(map(numbers, rows(tmp_path, "whole")))
    weights = "hf/model.safetensors"
    assert (tmp_path / "run" / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()


@pytest.mark.slow
def test_a_reward_that_loops_on_one_rank_ends_all_with_its_prompt(tmp_path: Path) -> None:
    extra = (*DATA_PARALLEL, "--evaluation.every", "0", "--parallel.wait-seconds", "4")
    failed = train(tmp_path, "run", "loops", *extra)
    assert failed.returncode == 1
    (line,) = failed.stderr.splitlines()
    found = json.loads((tmp_path / "run/reward_error.json").read_text())
    assert (
        "step 2" in line and "4 s (parallel.wait_seconds)" in line and f"; calls stand at {WORKER}:" in line
    )
    assert f"on prompt {found['prompt_index']}, response {found['sample']}" in line
    assert [x.name for x in (tmp_path / "run/checkpoints").iterdir()] == ["step_000001"]


def awaited(
    reward: Reward, wait: float, *, stop_after: float | None = None, stops: bool = True
) -> tuple[dict[int, Grade], dict[int, Failure | None], float]:
    """What comes of a right and then two wrong responses, and the seconds."""
    control, end = Control(Timeouts(wait=wait)), time.monotonic() + 30
    with Grader(reward, max_response_tokens=10) as grader:
        pending = {i: grader.submit(prompt("5", index=40 + i), STOPPED, "5" * (i + 1)) for i in range(3)}
        while not grader.standing() and time.monotonic() < end:
            time.sleep(0.1)  # its process starts
        began = time.monotonic()
        if stop_after is not None:
            threading.Timer(stop_after, control.request_stop).start()
        verdicts, failures = _awaited(pending, control, None, stops=stops)
    return verdicts, failures, time.monotonic() - began


@pytest.mark.parametrize("name", ["sleeps", "sleeps_awaited", "loops_always", "blocks_the_loop"])
def test_a_verdict_that_never_comes_is_a_failure_with_its_prompt(name: str) -> None:
    verdicts, failures, seconds = awaited(Reward(name=f"reward_worker:{name}"), 0.3)
    ((number, failure),) = failures.items()
    assert not verdicts and failure is not None and failure.prompt.index == 40 + number
    line = f"gave no grade in 0.3 s (parallel.wait_seconds); calls stand at {WORKER}:"
    assert failure.problem.startswith(line) and failure.problem.removeprefix(line).isdecimal()
    assert seconds < 4


def test_the_stacks_are_printed_if_a_call_holds_the_gil(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("megatron_fspo.rewards.process.STANDING_SECONDS", 5.0)
    with Grader(Reward(name="reward_worker:holds_the_gil"), max_response_tokens=10) as grader:
        pending = {0: grader.submit(prompt("5", index=40), STOPPED, "5")}
        _, failures = _awaited(pending, Control(Timeouts(wait=1.0)), None, stops=True)
        began = time.monotonic()
    assert failures[0] is not None and failures[0].problem.endswith("1 s (parallel.wait_seconds)")
    assert f'{WORKER}", line' in capfd.readouterr().err
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("name", ["sleeps", "loops_always"])
@pytest.mark.parametrize("stops", [True, False])
def test_a_request_to_stop_leaves_grades_open(
    name: str, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_fspo.trainer.sampling._STOP_SECONDS", 0.5)
    verdicts, failures, seconds = awaited(
        Reward(name=f"reward_worker:{name}"), 60, stop_after=0.2, stops=stops
    )
    assert not verdicts and list(failures.values()) == [None] and seconds < 4


def test_a_failure_behind_a_verdict_that_does_not_come_is_seen_at_once() -> None:
    verdicts, failures, seconds = awaited(Reward(name="reward_worker:raises_behind"), 60)
    ((number, failure),) = failures.items()
    assert not verdicts and number == 1 and failure is not None and "ZeroDivisionError" in failure.problem
    assert seconds < 4


def test_verdicts_of_frozen_workers_are_failures() -> None:
    """Stopped by SIGSTOP: they take no answer, and the pool closes all the same."""
    with Grader(Reward(name="math", workers=2), max_response_tokens=10) as grader:
        for process in psutil.Process().children():
            if "rewards.worker" in " ".join(process.cmdline()):
                process.suspend()
        pending = {i: grader.submit(prompt(r"\sqrt{2}", i), STOPPED, r"\boxed{2^{1/2}}") for i in (7, 9)}
        verdicts, failures = _awaited(pending, Control(Timeouts(wait=0.5)), None, stops=True)
    assert not verdicts and failures[7] is not None and failures[7].prompt.index == 7


@pytest.mark.slow
def test_a_reward_that_fails_in_an_evaluation_leaves_the_step_before_it(tmp_path: Path) -> None:
    """One rank grades for the two that share a model; the other ends with it."""
    failed = train(tmp_path, "run", "nan_in_evaluation", "--evaluation.every", "2")
    assert failed.returncode == 1
    (line,) = failed.stderr.splitlines()
    assert line.startswith(
        "megatron-fspo: evaluation after step 2: reward 'reward_worker:nan_in_evaluation' "
    )
    assert "returned nan instead of a finite number on prompt 0, response 0 (written to " in line
    found = rows(tmp_path, "run")
    assert [row["step"] for row in found] == [0, 1, 2]
    assert ["val/validation/mean@2" in row for row in found] == [True, False, False]
    assert [x.name for x in (tmp_path / "run/checkpoints").iterdir()] == ["step_000002"]
    resumed = train(tmp_path, "run", "sound", "--evaluation.every", "2", "--resume")
    assert resumed.returncode == 0, why(resumed.stderr)
    assert rows(tmp_path, "run") == found and (tmp_path / "run/hf/model.safetensors").exists()


def test_the_file_is_no_run_where_there_is_none(tmp_path: Path, job: None) -> None:
    """``evaluate`` makes no folder, and ``train`` would take one for a run."""
    config = logged(tmp_path)
    completion = Completion(token_ids=(1,), log_probs=(0.0,), finish_reason="stop", weight_version=0)
    failure = Failure(prompt=prompt("1", 7), completion=completion, response="2", problem="failed")
    for path in (tmp_path / "one/reward_error.json", tmp_path / "one.reward_error.json"):
        with pytest.raises(RewardError, match=r"failed on prompt 7, response 1 \(written to "):
            raise_first(config, {3: failure}, samples=2)
        assert json.loads(path.read_text())["sample"] == 1
        shutil.rmtree(config.run_folder, ignore_errors=True)
