"""``benchmarks/long_responses.py``: its own functions, and its short form for real."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib

import pytest
import torch
from torch import Tensor

from benchmarks import long_responses
from launch import REPO, environment
from megatron_fspo.types import Completion, Prompt, Sample
from packs import packs_of


def sample(number: int, length: int) -> Sample:
    tokens = tuple(range(length))
    return Sample(
        number=number,
        prompt=Prompt(index=0, token_ids=(1, 2, 3), text="", answer=""),
        completion=Completion(
            token_ids=tokens, log_probs=[-1.0] * length, finish_reason="stop", weight_version=0
        ),
        reward=0.0,
        advantage=1.0,
    )


def test_columns_of_packs_come_back_response_by_response() -> None:
    lengths = [4, 1, 3, 2]
    packs = packs_of([sample(i, n) for i, n in enumerate(lengths)], [(2, 0), (3, 1)])
    columns = [batch.sample_index[batch.segment.clamp(max=1)] * 10.0 + batch.labels for batch in packs]
    found = long_responses.in_order(packs, columns, torch.tensor(lengths))
    assert found.tolist() == [0, 1, 2, 3, 10, 20, 21, 22, 30, 31]


def walks(signal: float) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, lengths of 20 to 2,000, prompts: 240 responses."""
    generator = torch.Generator().manual_seed(0)
    lengths = (20 * 100 ** torch.rand(240, generator=generator)).long()
    tokens = 0.02 * torch.randn(int(lengths.sum()), generator=generator, dtype=torch.float64)
    shared = signal * torch.randn(240, generator=generator, dtype=torch.float64)
    return tokens + shared.repeat_interleave(lengths), lengths, torch.arange(240) // 4


def test_a_signal_is_told_from_noise() -> None:
    noise, both = (long_responses.figures(*walks(signal)) for signal in (0.0, 0.002))
    low, high = noise["exponent"]["interval"]
    assert low < 0.5 < high < both["exponent"]["interval"][0] + 0.3
    assert both["exponent"]["value"] > 0.65
    assert both["signal"]["interval"][0] > 0.001 > noise["signal"]["value"]
    assert both["signal"]["interval"][0] < 0.002 < both["signal"]["interval"][1]
    short, _, long = both["exponents_at"]
    assert short["value"] < 0.8 < 0.9 < long["value"]
    assert all(abs(value) < 0.02 for value in noise["autocorrelation"].values())
    assert both["autocorrelation"]["256"] == pytest.approx(0.01, abs=0.008)
    for found in (noise, both):
        assert sum(one["responses"] for one in found["checks"]) == 240
        inside = [one["difference"][0] <= 0 <= one["difference"][1] for one in found["checks"]]
        assert sum(inside) >= 3
    for part in ("predicted", "measured"):
        assert all(0 < width(one[part]["interval"]) < 0.4 for one in both["checks"])
    low, high = noise["within"]["interval"]
    assert low < 0.5 < high < 0.65 < both["within"]["interval"][0]
    assert 60 <= noise["within"]["responses"] < 70 and noise["within"]["to"] >= 32 * noise["within"]["from"]


def test_parts_that_are_not_there_are_told_from_what_is_measured() -> None:
    """Short responses that move more than the parts, which know no such thing, predict."""
    tokens, lengths, prompts = walks(0.002)
    scale = torch.where(lengths < 70, 8.0, 1.0).double()
    found = long_responses.figures(tokens * scale.repeat_interleave(lengths), lengths, prompts)
    assert found["checks"][0]["difference"][0] > 0 > found["checks"][2]["difference"][1]


def test_losses_are_compared_at_the_same_share_outside() -> None:
    """Noise alone: √L is even, a constant band and one on the mean are not, and neither are all prefixes."""
    noise, both = (long_responses.evenness(*walks(signal)) for signal in (0.0, 0.002))
    for found in (noise, both):
        assert all(one["outside"] == pytest.approx(long_responses.OUTSIDE) for one in found.values())
        assert found["measured"]["above_measured"] == {"value": 0, "interval": [0, 0]}
        assert all(0.03 < one["lre_null"] < 0.06 for one in found.values())
        assert all(one["lre_mean"]["value"] < one["lre_max"] for one in found.values())
    assert noise["fspo"]["lre_mean"]["value"] < noise["fspo"]["lre_null"]
    for loss in ("rloo", "gspo"):
        assert noise[loss]["above_measured"]["interval"][0] > 0
    rates = {loss: one["rates"] for loss, one in noise.items()}
    assert rates["rloo"] == sorted(rates["rloo"]) and rates["gspo"][::-1] == sorted(rates["gspo"])
    assert rates["ctpo"] == sorted(rates["ctpo"])
    # With a signal √L is not, and a measured exponent is.
    for loss in ("fspo", "rloo", "ctpo"):
        assert both[loss]["above_measured"]["interval"][0] > 0


def test_how_far_out_a_response_lies() -> None:
    """S = 3, −4 in 4 tokens each; the first is farthest out as a prefix of 1 token."""
    tokens = torch.tensor([5.0, -1, -1, 0, -1, -1, -1, -1], dtype=torch.float64)
    found = long_responses.reaches(tokens, torch.tensor([4, 4]), torch.tensor([0, 4]))
    assert found["fspo"].tolist() == [1.5, 2.0] and found["rloo"].tolist() == [3, 4]
    assert found["gspo"].tolist() == [0.75, 1.0] and found["ctpo"].tolist() == [5, 2]


def test_the_figures_are_of_the_run_that_is_there() -> None:
    """Changed settings need the command again."""
    found = json.loads((REPO / "benchmarks/results/long_responses.json").read_text(encoding="utf-8"))
    assert found["run"] == tomllib.loads(long_responses.CONFIG.read_text(encoding="utf-8"))
    assert found["prompts"] == found["run"]["rollout"]["prompts"]
    assert found["responses"] == found["prompts"] * found["run"]["rollout"]["samples"]


def width(interval: list[float]) -> float:
    return interval[1] - interval[0]


@pytest.mark.slow
def test_the_short_form_runs_and_keeps_nothing() -> None:
    results = {path: path.stat().st_mtime_ns for path in (REPO / "benchmarks/results").iterdir()}
    command = [sys.executable, "-W", "ignore", "benchmarks/long_responses.py", "--short"]
    done = subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["responses"] == 256 and found["prompts"] == 32
    noise, one, three = (found["differences"][name] for name in long_responses.DIFFERENCES)
    assert 0 < noise["noise"]["value"] < one["noise"]["value"] < three["noise"]["value"]
    assert results == {path: path.stat().st_mtime_ns for path in (REPO / "benchmarks/results").iterdir()}
