"""Responses of 2,000 tokens through the trainer: the band follows where S lies."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from launch import REPO
from megatron_fspo.lab.plan.presets import PRESETS
from megatron_fspo.lab.report.history import read_records
from runs import rows, trained

sys.path.insert(0, str(REPO / "benchmarks"))

from gpu_training import make_checkpoint

pytestmark = pytest.mark.slow

C = 0.15
KEYS = f"""--parallel.tensor 1 --parallel.sequence false --run.steps 4 --rollout.prompts 4
--rollout.samples 8 --rollout.max-response-tokens 2048 --batch.max-tokens 8192
--loss.calibrate 0 --loss.c-low {C} --loss.c-high {C}
--loss.temper 0.5 --optimizer.lr 1e-2 --evaluation.every 0 --checkpoint.every 0 --log.sequences 1000
--reward.name gpu_training:at_random""".split()


def test_the_band_lies_around_the_drift_of_long_responses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = dict(num_layers=1, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=64)
    # The stop token is one of 2,048: half of the responses reach the limit.
    make_checkpoint(replace(PRESETS["qwen3-1.7b"], **shape, vocab_size=2048), tmp_path / "model")
    monkeypatch.setenv("PYTHONPATH", str(REPO / "benchmarks"), prepend=":")
    trained(tmp_path, "long", *KEYS, "--model.checkpoint", str(tmp_path / "model"), nproc=1)
    steps = [row for row in rows(tmp_path, "long") if "fspo/drift" in row][2:]
    assert all(row["fspo/drift"] < -0.0005 for row in steps)
    records = read_records(tmp_path / "long")
    late = records.select((records.step > 2) & (records.length > 1000))
    assert len(late) > 15 and late.log_ratio_sum.mean() < -2
    # An uncentred band would leave all on one side.
    edge = C * np.sqrt(late.length)
    one_sided, above = (late.log_ratio_sum < -edge).mean(), (late.log_ratio_sum > edge).mean()
    last = [max(int(name[-1]) for name in row if name.startswith("fspo/below/bin_")) for row in steps]
    below = np.mean([row[f"fspo/below/bin_{number}"] for row, number in zip(steps, last, strict=True)])
    assert above == 0 < below < one_sided, (below, one_sided)
