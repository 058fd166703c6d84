"""The sampler against the trainer: metrics from packs equal those from the responses, whatever the packs."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_fspo.mismatch.measure import measure
from megatron_fspo.types import Sample
from mismatch_cases import ALONE, PACKS, packed, responses


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
    }
    assert got.keys() == want.keys()
    assert got == pytest.approx({name: value.item() for name, value in want.items()}, rel=1e-2)
    exact = {name: value.item() for name, value in want.items() if "sigma" not in name}
    assert {name: got[name] for name in exact} == pytest.approx(exact, rel=1e-6)


def test_a_bias_shows_in_k1_and_noise_does_not() -> None:
    samples, deltas = responses(scale=0.0, shift=-0.2)
    biased = metrics(samples, deltas, [[0, 1, 2, 3, 4]])
    assert biased["rollout/kl_k1"] == pytest.approx(0.2)
    assert biased["rollout/kl_k3"] == pytest.approx(math.exp(-0.2) - 0.8)


def test_tokens_that_are_not_finite_are_left_out() -> None:
    samples, deltas = responses()
    deltas[2][3] = math.nan
    got = metrics(samples, deltas, [[0, 1, 2, 3, 4]])
    tokens = torch.cat(deltas)
    assert got["rollout/logprob_abs_diff/mean"] == pytest.approx(
        tokens[tokens.isfinite()].abs().mean().item()
    )
    assert all(math.isfinite(value) for value in got.values())
