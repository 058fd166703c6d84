"""Tokens per second, FLOPs and the table of phases."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from configs import make_config
from launch import forked, why
from megatron_fspo.mcore.machine.backend import choose_backend, find_peak, peak_tflops
from megatron_fspo.trainer.metrics import profiled, table
from megatron_fspo.weights import Architecture
from megatron_fspo.weights.flops import forward_flops
from runs import PROGRAM, rows, train_words

ARCH = Architecture(
    model_type="qwen3", num_layers=3, hidden_size=8, num_heads=4, num_kv_heads=2, head_dim=5, ffn_size=16,
    vocab_size=100, tied=True, rms_norm_eps=1e-6, rope_theta=1e6, max_position_embeddings=64,
    dtype=torch.float32,
)  # fmt: skip


def test_flops_by_hand() -> None:
    """One sequence of 3 + 4 tokens."""
    matrices = 8 * 20 + 2 * 8 * 10 + 20 * 8 + 3 * 8 * 16  # q, k and v, output, MLP
    attention = 4 * 7 * 7 * 5  # heads, pairs of tokens, head size: half of them, twice
    want = 3 * (2 * 7 * matrices + 2 * attention) + 2 * 100 * 8 * 4
    assert forward_flops(ARCH, [3], [4]) == want
    assert forward_flops(ARCH, [3, 3], [4, 4]) == 2 * want and forward_flops(ARCH, [], []) == 0
    # Two tokens of the prompt are computed once for both, and are seen by both.
    shared = 3 * (2 * 2 * matrices + 2 * 4 * 2 * 2 * 5)
    assert forward_flops(ARCH, [3, 3, 3], [4, 4, 4], [0, 0, 1]) == 3 * want - shared


def test_what_a_gpu_can_do_is_known_by_its_name() -> None:
    peaks = {"H100 80GB HBM3": 989.0, "H100 PCIe": 756.0, "H200": 989.0, "H20": 148.0, "T4": None}
    assert {name: find_peak(f"NVIDIA {name}") for name in peaks} == peaks
    assert peak_tflops(choose_backend("cpu"), torch.bfloat16) is None


def test_the_table_of_phases() -> None:
    step = {"timing_s/gen": 6.0, "timing_s/update_actor": 2.0, "timing_s/step": 8.0}
    step |= {"perf/tokens_per_second_per_gpu": 100.0, "perf/mfu": 0.4}
    evaluation, other = {"timing_s/testing": 9.0}, {**step, "timing_s/gen": 8.0, "timing_s/step": 10.0}
    head, *lines = table([evaluation, step, other]).splitlines()
    assert head.split() == "phase, mean of 2 steps s share tokens/s per rank MFU".split()
    assert [line.split() for line in lines] == [
        ["sampling,", "grading", "7.00", "78%", "129"],
        ["update", "2.00", "22%", "450", "40.0%"],
        ["step", "9.00", "100%", "100"],
    ]
    assert table([evaluation]) == ""


@pytest.mark.slow
def test_a_run_reports_its_speed_profiles_and_draws(tmp_path: Path) -> None:
    """One process; wandb gets the pictures of the evaluation."""
    extra = "--parallel.tensor 1 --parallel.sequence false --run.steps 3 --evaluation.every 3".split()
    log = ["--log.peak-tflops", "0.001", "--log.wandb", "offline", "--log.profile", "[2, 2]"]
    words = train_words(tmp_path, "fast", *extra, *log)
    result = forked([*PROGRAM, *words], nproc=0)
    assert result.returncode == 0, why(result.stderr)
    training = [row for row in rows(tmp_path, "fast") if row["step"]]
    for row in training:
        assert row["perf/tokens_per_second_per_gpu"] == row["perf/throughput"]
        assert 0 < row["perf/mfu"] < 1000
    assert "phase, mean of 3 steps" in result.stdout and "tokens/s per rank" in result.stdout
    media = tmp_path / "fast/wandb"
    pictures = media.glob("offline-run-*/files/media/html/pictures/*.html")
    assert {path.name.partition("_")[0] for path in pictures} == {"rates", "scatter"}
    (trace,) = (tmp_path / "fast/profiles").rglob("*.gz")
    assert str(trace.relative_to(tmp_path)) == "fast/profiles/step_000002/rank_00000.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert "aten::mm" in names or "aten::addmm" in names


def test_a_file_asks_for_a_profile_of_the_next_step(tmp_path: Path, job: None) -> None:
    control, log = mock.Mock(), mock.Mock()
    (tmp_path / "one").mkdir()
    (tmp_path / "one/profile").touch()
    for step in (7, 8):
        with profiled(make_config(tmp_path), choose_backend("cpu"), control, log, step):
            torch.ones(3) + 1
    folder = tmp_path / "one/profiles/step_000007"
    assert [*tmp_path.rglob("*.gz")] == [folder / "rank_00000.json.gz"]
    assert log.method_calls == [mock.call.say(f"step 7: profiled, see {folder}")]
    assert not (tmp_path / "one/profile").exists()


def test_a_profile_that_cannot_be_written_is_named_and_ends_nothing(tmp_path: Path, job: None) -> None:
    control, log = mock.Mock(), mock.Mock()
    (tmp_path / "one").mkdir()
    (tmp_path / "one/profile").touch()
    (tmp_path / "one/profiles").write_text("in the way")
    with profiled(make_config(tmp_path), choose_backend("cpu"), control, log, 8):
        pass
    ((_, (line,), _),) = log.method_calls
    assert "rank_00000.json.gz" in line and "one/profiles" in line.rpartition("Errno")[2]
