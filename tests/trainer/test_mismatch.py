"""The sampler against the trainer: metrics from packs equal those from the responses, whatever the packs."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fspo.packing.batch import collate
from megatron_fspo.trainer.mismatch import mismatch_metrics
from megatron_fspo.types import Completion, Prompt, Sample

ALONE: Any = SimpleNamespace(size=lambda: 1)
LENGTHS = [1, 9, 30, 0, 4]


def sample(index: int, log_probs: list[float]) -> Sample:
    prompt = Prompt(index=index, token_ids=(1, 2, 3)[: 1 + index % 3], text="", answer="")
    completion = Completion(
        token_ids=(5,) * len(log_probs), log_probs=tuple(log_probs), finish_reason="length", weight_version=0
    )
    return Sample(prompt=prompt, number=0, completion=completion, reward=0.0, advantage=0.0)


def responses(scale: float = 0.1, shift: float = 0.0) -> tuple[list[Sample], list[torch.Tensor]]:
    """Samples, and per response the Δ of its tokens."""
    generator = torch.Generator().manual_seed(0)
    deltas = [torch.randn(n, generator=generator, dtype=torch.float64) * scale + shift for n in LENGTHS]
    return [sample(i, [-1.5] * n) for i, n in enumerate(LENGTHS)], deltas


def metrics(samples: list[Sample], deltas: list[torch.Tensor], packs: list[list[int]]) -> dict[str, float]:
    batches = [collate(samples, pack, num_sequences=4, num_tokens=sum(LENGTHS)) for pack in packs]
    scores = []
    for batch in batches:
        score = torch.full(batch.mask.shape, math.nan, dtype=torch.float64)  # outside the mask: anything
        for number, index in enumerate(batch.sample_index.tolist()):
            score[batch.mask & (batch.segment == number)] = deltas[index] - 1.5
        scores.append(score)
    return mismatch_metrics(batches, scores, LENGTHS, group=ALONE, device=torch.device("cpu"))


@pytest.mark.parametrize("packs", [[[0, 1, 2, 3, 4]], [[4, 2], [3, 0], [1]], [[2], [1], [0], [4], [3]]])
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
