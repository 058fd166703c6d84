"""The sampler against the trainer: metrics from packs equal those from the responses, whatever the packs."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_fspo.objective.calibration import sigma_hat
from megatron_fspo.trainer.mismatch import measure, outlier_share
from megatron_fspo.types import Sample
from mismatch_cases import ALONE, PACKS, packed, responses, sample


def metrics(samples: list[Sample], deltas: list[torch.Tensor], packs: list[list[int]]) -> dict[str, float]:
    return measure(packed(samples, deltas, packs), len(samples), group=ALONE).metrics


@pytest.mark.parametrize("packs", PACKS)
def test_metrics_are_those_of_the_responses(packs: list[list[int]]) -> None:
    samples, deltas = responses()
    got, tokens = metrics(samples, deltas, packs), torch.cat(deltas)
    spread = torch.stack([d.sum().abs() / len(d) ** 0.5 for d in deltas if len(d)]).quantile(0.5) / 0.6745
    want = {
        "rollout/logprob_abs_diff/mean": tokens.abs().mean(),
        "rollout/logprob_abs_diff/max": tokens.abs().max(),
        "rollout/kl_k1": -tokens.mean(),
        "rollout/kl_k3": (tokens.exp() - 1 - tokens).mean(),
        "rollout/mismatch_sigma": spread,
        "rollout/mismatch_outliers": torch.zeros(()),
    }
    assert got.keys() == want.keys()
    assert got == pytest.approx({name: value.item() for name, value in want.items()}, rel=1e-2)
    exact = {name: value.item() for name, value in want.items() if "sigma" not in name}
    assert {name: got[name] for name in exact} == pytest.approx(exact, rel=1e-6)


def test_tokens_that_are_not_finite_are_left_out() -> None:
    samples, deltas = responses()
    deltas[2][3] = math.nan
    got = metrics(samples, deltas, [[0, 1, 2, 3, 4]])
    tokens = torch.cat(deltas)
    assert got["rollout/logprob_abs_diff/mean"] == pytest.approx(
        tokens[tokens.isfinite()].abs().mean().item()
    )
    assert all(math.isfinite(value) for value in got.values())


def noisy(broken: int) -> tuple[list[Sample], list[torch.Tensor]]:
    """200 responses with noise of 0.01 nats per token; the first ``broken`` with 100 times as much."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 40, (200,), generator=generator).tolist()
    scales = [1.0 if i < broken else 0.01 for i in range(200)]
    deltas = [
        torch.randn(n, generator=generator, dtype=torch.float64) * scale
        for n, scale in zip(lengths, scales, strict=True)
    ]
    return [sample(i, [-1.5] * n) for i, n in enumerate(lengths)], deltas


def test_outliers_show_a_minority_that_the_median_does_not() -> None:
    """15 % of the responses diverge a hundredfold: σ̂ grows by a fifth, and their share is logged."""
    sound, mixed = (metrics(*noisy(broken), [[*range(200)]]) for broken in (0, 30))
    assert sound["rollout/mismatch_sigma"] == pytest.approx(0.01, rel=0.15)
    assert sound["rollout/mismatch_outliers"] == 0
    assert mixed["rollout/mismatch_sigma"] == pytest.approx(0.0122, rel=0.15)
    # A few of them come out small by chance: |Z| < 0.07 has a probability of 6 %.
    assert mixed["rollout/mismatch_outliers"] == pytest.approx(0.15, abs=0.02)


def test_gaussian_noise_has_no_outliers_even_where_few_responses_say_what_is_usual() -> None:
    generator = torch.Generator().manual_seed(0)
    shares = []
    for _ in range(1000):
        sums = torch.randn(32, generator=generator, dtype=torch.float64) * 0.3
        lengths = torch.full((32,), 900)
        shares.append(outlier_share(sums, lengths, sigma_hat(sums, lengths)))
    assert sum(shares) / len(shares) < 1e-4


def test_outliers_leave_out_what_is_not_finite_or_empty() -> None:
    sums = torch.tensor([math.nan, 0.0, 0.59, -0.61, math.inf], dtype=torch.float64)
    lengths = torch.tensor([4, 0, 100, 100, 4])
    assert outlier_share(sums, lengths, 0.01) == 0.5
    assert math.isnan(outlier_share(sums[:2], lengths[:2], math.nan))
