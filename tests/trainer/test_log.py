"""What a run writes down, and what is left of it after a crash or a resume."""

from __future__ import annotations

import json
import math
import sys
import tracemalloc
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import mismatch_cases
from configs import make_config
from megatron_fspo.config import Config, Log
from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.record import log as log_module
from megatron_fspo.record import rows as rows_module
from megatron_fspo.record.log import RunLog
from megatron_fspo.record.records import SequenceRecord
from megatron_fspo.record.rows import describe, read_rows, rows_from_end
from megatron_fspo.record.trackers import check_trackers


def logged(folder: Path, **log: Any) -> Config:
    """A run with a folder and these keys of the section ``log``."""
    config = make_config(folder, log=log)
    config.run_folder.mkdir(parents=True, exist_ok=True)
    return config


def start(folder: Path, **log: Any) -> RunLog:
    return RunLog(logged(folder, **log), writer=True, resume_step=None)


def record(number: int, **changes: Any) -> SequenceRecord:
    values = {"length": number + 1, "s": number / 8, "advantage": -1.0, "sample": number}
    return mismatch_cases.record(**{**values, **changes})


def strict_rows(path: Path) -> list[Any]:
    """As any other JSON parser would read it: NaN and Infinity are errors."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_step_is_a_row_and_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = start(tmp_path)
    log.step(7, {"critic/rewards/mean": 0.25, "fspo/lre_mean": math.nan, "x": math.inf, "y": -math.inf})
    assert strict_rows(tmp_path / "one/metrics.jsonl") == [
        {"step": 7, "critic/rewards/mean": 0.25, "fspo/lre_mean": None, "x": None, "y": None}
    ]
    assert capsys.readouterr().out == "step    7/300  reward 0.250\n"


def test_the_line_of_a_step() -> None:
    metrics = {"critic/rewards/mean": 0.51234, "response_length/mean": 81.26, "actor/pg_clipfrac": 0.0512}
    metrics |= {"fspo/kl_k3": 0.00123, "actor/grad_norm": 0.756, "fspo/nonfinite": 2.0}
    metrics |= {
        "timing_s/step": 12.34,
        "val/test/mean@4/low": 0.5,
        "val/test/mean@4": 0.625,
        "not/shown": 1.0,
    }
    line = "step   12/300  reward 0.512  length 81.3  clipped 5.1%  KL 0.0012  grad 0.76  dropped 2"
    assert describe(12, 300, metrics) == f"{line}  s 12.3  test/mean@4 0.625"
    assert "dropped" not in describe(12, 300, metrics | {"fspo/nonfinite": 0.0})


def filled(config: Config, steps: int) -> None:
    log = RunLog(config, writer=True, resume_step=None)
    for step in range(steps + 1):
        log.step(step, {"x": float(step)})
        log.sequences(step, [record(0)])
        log.responses(step, [SAMPLE | {"response": f"{step}\u2028a"}, SAMPLE | {"response": f"{step}b"}])


SAMPLE = {"prompt": "p", "response": "", "answer": "a", "reward": 0.5}
FILES = ("metrics.jsonl", "sequences.jsonl", "samples.jsonl")


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    config = logged(tmp_path)
    filled(config, 5)
    log = RunLog(config, writer=True, resume_step=3)
    log.step(4, {"x": 44.0})
    metrics, sequences, samples = (list(read_rows(config.run_folder / name)) for name in FILES)
    assert [(row["step"], row["x"]) for row in metrics] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 44.0)]
    assert [row["step"] for row in sequences] == [0, 1, 2, 3]
    assert [row["response"] for row in samples[-2:]] == ["3\u2028a", "3b"]
    assert {path.name for path in config.run_folder.iterdir()} == set(FILES)
    RunLog(config, writer=True, resume_step=None)
    assert [(config.run_folder / name).read_text() for name in FILES] == ["", "", ""], "a new run"


def test_a_line_that_a_crash_cut_short_is_gone_after_a_resume(tmp_path: Path) -> None:
    config = logged(tmp_path)
    filled(config, 2)
    path = config.run_folder / "metrics.jsonl"
    for cut in ('{"step": 3, "x"', '{"step": 3, "x": 3.0}'):  # also one that lacks the line feed alone
        with path.open("a") as file:
            file.write(cut)
        assert [row["step"] for row in read_rows(path)] == [0, 1, 2]
        RunLog(config, writer=True, resume_step=2).step(3, {"x": 33.0})
        assert [row["x"] for row in strict_rows(path)] == [0.0, 1.0, 2.0, 33.0]
        RunLog(config, writer=True, resume_step=2)
    assert list(read_rows(tmp_path / "none.jsonl")) == []


def test_sequences_are_thinned_evenly(tmp_path: Path) -> None:
    log = start(tmp_path, sequences=4)
    for count in (0, 1, 4, 5, 10, 12):
        log.sequences(count, [record(i) for i in range(count)])
    log.sequences(13, [record(0, nonfinite=True)])
    rows = strict_rows(tmp_path / "one/sequences.jsonl")
    kept = {row["step"]: [length - 1 for length in row["length"]] for row in rows}
    assert kept == {1: [0], 4: [0, 1, 2, 3], 5: [0, 2, 4], 10: [0, 3, 6, 9], 12: [0, 3, 6, 9]}
    assert rows[-1]["log_ratio_sum"] == [0.0, 3 / 8, 6 / 8, 9 / 8]
    start(tmp_path / "none", sequences=0).sequences(1, [record(0)])
    assert (tmp_path / "none/one/sequences.jsonl").read_text() == ""


def test_the_columns_of_sequences(tmp_path: Path) -> None:
    start(tmp_path).sequences(
        3,
        [
            record(0, clipped_high=1.0, out_of_band=True, ratio=0.0),
            record(1, s=math.nan, nonfinite=True),
            record(2, advantage=math.nan, nonfinite=True),
            record(3, length=0),
            record(4, dual_clipped=0.25, ratio=2.0),
            record(5, sample=9, advantage=0.0, out_of_band=True),
        ],
    )
    # What is in no rate is not kept: two that were dropped, and one without a response.
    assert strict_rows(tmp_path / "one/sequences.jsonl") == [
        {
            "step": 3,
            "prompt": [0, 0, 1],
            "update": [1, 1, 1],
            "length": [1, 5, 6],
            "log_ratio_sum": [0.0, 0.5, 0.625],
            "advantage": [-1.0, -1.0, 0.0],
            "clipped": [True, True, False],
            "out_of_band": [True, False, True],
            "ratio": [0.0, 2.0, None],
        }
    ]


def test_tokens_that_flipped_have_columns(tmp_path: Path) -> None:
    log = start(tmp_path)
    log.sequences(1, [record(0), record(1, flipped=2, flipped_log_ratio_sum=0.25)])
    (row,) = strict_rows(tmp_path / "one/sequences.jsonl")
    assert row["flipped"] == [0, 2] and row["flipped_log_ratio_sum"] == [0.0, 0.25]


def test_other_ranks_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = logged(tmp_path)
    filled(config, 1)
    before = {name: (config.run_folder / name).read_text() for name in FILES}
    capsys.readouterr()
    log = RunLog(config, writer=False, resume_step=None)
    log.step(1, {"x": 1.0})
    log.sequences(1, [record(0)])
    log.responses(1, [SAMPLE])
    log.say("hello")
    log.close()
    assert {name: (config.run_folder / name).read_text() for name in FILES} == before
    assert capsys.readouterr() == ("", "")


def test_phases_add_up_their_seconds(tmp_path: Path) -> None:
    log = start(tmp_path)
    log.timings["timing_s/gen"] = 100.0
    with log.phase("gen", 3, "response") as progress:
        progress(3)
    assert log.timings.keys() == {"timing_s/gen"} and 100.0 < log.timings["timing_s/gen"] < 101.0


def test_wandb_gets_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package, offline. A run has an id of its own, and keeps it at a resume."""
    wandb = pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    words = {"project": "tests", "group": "sweep", "tags": ["a", "b"], "entity": "somebody"}
    log = start(tmp_path, wandb="offline", **words)
    log.step(1, {"critic/rewards/mean": 0.5})
    log.step(2, {"critic/rewards/mean": 0.75})
    run = wandb.run
    assert run is not None and (run.project, run.name) == ("tests", "one")
    assert (run.entity, run.group, run.tags) == ("somebody", "sweep", ("a", "b"))
    assert run.config["rollout"]["prompts"] == 4
    assert run.summary["critic/rewards/mean"] == 0.5  # a row is complete when the next begins
    log.warn("weights", "too small")
    log.pictures(2, lambda folder: {"scatter": f"<svg>{folder.name}</svg>"})
    media = "wandb/offline-run-*/files/media/html/pictures/scatter_2_*.html"
    (picture,) = (tmp_path / "one").glob(media)
    assert "<svg>one</svg>" in picture.read_text()
    first = run.id
    log.close()
    assert wandb.run is None
    assert list((tmp_path / "one/wandb").glob(f"offline-run-*/run-{first}.wandb"))

    ids = []
    for folder, step in ((tmp_path, 3), (tmp_path / "other", None)):
        log = RunLog(logged(folder, wandb="offline"), writer=True, resume_step=step)
        assert wandb.run is not None
        ids.append(wandb.run.id)
        log.close()
    assert ids[0] == first != ids[1], "the same name in another folder is another run"


def test_trackers_hear_of_warnings_and_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = mock.Mock()
    monkeypatch.setattr(log_module, "start_trackers", lambda config, resume_step: [told])
    log = start(tmp_path)
    for step in range(3, 25):
        log.remind("weights", step, "too small")
    log.remind("another", 25, "too large")
    log.say("hello")
    with pytest.raises(TrainingError), log.ending():
        raise TrainingError("the gradient is not finite")
    warned = [("weights", "step 3: too small"), ("weights", "step 23: too small")]
    warned += [("another", "step 25: too large"), ("the run ended itself", "the gradient is not finite")]
    assert told.method_calls == [*(mock.call.alert(*words) for words in warned), mock.call.close(failed=True)]
    lines = "step 3: too small\nstep 23: too small\nstep 25: too large\nhello\n"
    assert capsys.readouterr().out == lines


def test_a_warning_is_kept_and_given_once_per_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = start(tmp_path)
    for step in (4, 5):
        log.activity.step = step
        log.warn_once("wide band", f"seen at {step}")
    kept = [{"step": 4, "title": "wide band", "text": "seen at 4"}]
    assert strict_rows(tmp_path / "one" / "warnings.jsonl") == kept
    # A job that goes on before that step warns again, one that goes on behind it does not.
    for resume_step, again in ((4, False), (3, True)):
        capsys.readouterr()
        RunLog(logged(tmp_path), writer=True, resume_step=resume_step).warn_once("wide band", "again")
        assert ("again" in capsys.readouterr().out) == again


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = logged(tmp_path, tensorboard=True)
    log = RunLog(config, writer=True, resume_step=None)
    for step in (1, 2, 3):
        log.step(step, {"critic/rewards/mean": step / 4, "fspo/lre_mean": math.nan})
    log.close()
    log = RunLog(config, writer=True, resume_step=2)
    log.step(3, {"critic/rewards/mean": 8.0})
    log.close()
    events = EventAccumulator(str(config.run_folder / "tensorboard")).Reload()
    values = [(event.step, event.value) for event in events.Scalars("critic/rewards/mean")]
    assert values == [(1, 0.25), (2, 0.5), (3, 8.0)] and events.Tags()["scalars"] == ["critic/rewards/mean"]


def logged_by(tracker: str, folder: Path) -> list[tuple[int, float]]:
    """Step and value of the reward, as the tracker's own package reads them."""
    name = "critic/rewards/mean"
    if tracker == "mlflow":
        client = pytest.importorskip("mlflow").MlflowClient(f"sqlite:///{folder}/mlflow/mlflow.db")
        run = (folder / "mlflow/run-id.txt").read_text().strip()
        assert client.get_run(run).info.status == "FINISHED"
        assert client.get_run(run).data.tags["warning: weights"] == "too small"
        return sorted((metric.step, metric.value) for metric in client.get_metric_history(run, name))
    if tracker == "trackio":
        from trackio.sqlite_storage import SQLiteStorage

        return sorted((row["step"], row[name]) for row in SQLiteStorage.get_logs("tests", "one"))
    assert any(name.encode() in file.read_bytes() for file in folder.rglob("*.swanlab"))
    return [(1, 0.25), (2, 0.5), (3, 0.75)]


@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.parametrize("tracker", ["mlflow", "swanlab", "trackio"])
def test_further_trackers_get_the_same_numbers(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real packages, without a network; a resumed run goes on with its own curve."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read at import
    pytest.importorskip(tracker, reason="the extra `trackers` is not installed")
    config = logged(tmp_path, project="tests", trackers=(tracker,))
    check_trackers(config.log)
    for resume_step in (None, 2):
        log = RunLog(config, writer=True, resume_step=resume_step)
        for step in (1, 2) if resume_step is None else (3,):
            log.step(step, {"critic/rewards/mean": step / 4, "val/a/mean@4": 1.0, "fspo/lre_mean": math.nan})
        log.warn("weights", "too small")
        log.close()
    assert logged_by(tracker, config.run_folder) == [(1, 0.25), (2, 0.5), (3, 0.75)]


@pytest.mark.filterwarnings("ignore")
def test_a_server_of_mlflow_that_is_away_is_named_and_costs_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow", reason="the extra `trackers` is not installed")
    config = logged(tmp_path, trackers=("mlflow",))
    log = RunLog(config, writer=True, resume_step=None)
    (tmp_path / "one/mlflow/mlflow.db").write_bytes(b"no longer a database")
    log.step(1, {"critic/rewards/mean": 0.5})
    assert "MLflow lost log_batch" in capsys.readouterr().err
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(InputError, match=r"log\.trackers: mlflow does not take the run"):
        RunLog(logged(tmp_path / "other", trackers=("mlflow",)), writer=True, resume_step=None)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_trackers(Log())
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    for name, log in (("tensorboard", Log(tensorboard=True)), ("wandb", Log(wandb="offline"))):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(InputError, match=f"needs the package {name}, wh"):
            check_trackers(log)


def test_a_full_disk_stops_the_run_with_one_line(tmp_path: Path) -> None:
    log = start(tmp_path)
    (tmp_path / "one/metrics.jsonl").unlink()
    (tmp_path / "one/metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(TrainingError, match=r"metrics\.jsonl cannot be written: No space .*--resume$"):
        log.step(1, {"x": 1.0})
    (tmp_path / "two/one/metrics.jsonl").mkdir(parents=True)
    with pytest.raises(TrainingError, match=r"metrics\.jsonl cannot be written: Is a directory"):
        start(tmp_path / "two")


@pytest.mark.parametrize("line", ['{"step": 1', "[1]", '{"loss": 1}', '{"step": "1"}', "\xff"])
def test_a_corrupt_row_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl:2: not a row of this trainer"):
        list(read_rows(path))


def test_a_resume_reads_and_writes_no_more_for_a_long_run(tmp_path: Path) -> None:
    config = logged(tmp_path)
    filled(config, 2)
    path = config.run_folder / "sequences.jsonl"
    line = json.dumps({"step": 1, "length": [7] * 100_000}) + "\n"
    path.write_text(line * 50 + line.replace('"step": 1', '"step": 3'))
    file, whole = path.stat().st_ino, path.stat().st_size
    tracemalloc.start()
    try:
        RunLog(config, writer=True, resume_step=2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8e6 < whole
    assert path.stat().st_ino == file and path.stat().st_size == whole - len(line)


@pytest.mark.parametrize("block", [1, 7, 40, 1000])
def test_rows_from_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(rows_module, "_BLOCK", block)
    path = tmp_path / "metrics.jsonl"
    for text in ("", '{"step": 1', '{"step": 1}\n', '{"step": 1}\n{"step": 2, "x": 0.5}\n{"step": 3}\n{"st'):
        path.write_text(text)
        assert list(rows_from_end(path)) == list(read_rows(path))[::-1]


def test_steps_without_a_row_are_named_at_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = logged(tmp_path)
    filled(config, 8)
    path = config.run_folder / "metrics.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join(rows[:3] + rows[4:6]))
    capsys.readouterr()
    RunLog(config, writer=True, resume_step=8)
    (line,) = capsys.readouterr().out.splitlines()
    assert str(path) in line and "4 steps: 3, 6-8" in line
    filled(config, 3)
    capsys.readouterr()
    RunLog(config, writer=True, resume_step=3)
    assert capsys.readouterr().out == ""
