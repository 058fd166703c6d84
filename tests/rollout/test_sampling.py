"""Drawing tokens, against the softmax written out; and streams that repeat."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_fspo.rollout.sampling import sample, uniforms

BELOW_ONE = 1 - 2**-53


def distribution(logits: list[float], temperature: float, top_p: float) -> list[float]:
    """Softmax, cut to its nucleus, in plain Python."""
    largest = max(logits)
    weights = [math.exp((logit - largest) / temperature) for logit in logits]
    probabilities = [weight / sum(weights) for weight in weights]
    kept: list[int] = []
    for token in sorted(range(len(logits)), key=lambda token: -probabilities[token]):
        if sum(probabilities[i] for i in kept) >= top_p:
            break
        kept.append(token)
    total = sum(probabilities[i] for i in kept)
    return [p / total if i in kept else 0.0 for i, p in enumerate(probabilities)]


def draw_many(logits: list[float], count: int, **how: float) -> tuple[Tensor, Tensor]:
    rows = torch.tensor(logits).expand(count, -1)
    return sample(rows, uniforms(1, 2, 3, count), **how)


LOGITS = [0.3, -1.0, 2.0, 0.0, 1.1, -3.0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5])
def test_frequencies_and_log_probs(temperature: float, top_p: float) -> None:
    count = 40_000
    expected = distribution(LOGITS, temperature, top_p)
    tokens, log_probs = draw_many(LOGITS, count, temperature=temperature, top_p=top_p)
    seen = tokens.bincount(minlength=len(LOGITS)).tolist()
    possible = [i for i, p in enumerate(expected) if p > 0]
    assert sum(seen[i] for i in possible) == count
    # χ² with up to 5 degrees of freedom passes 25 once in 7,000 streams; this stream is fixed.
    assert sum((seen[i] - count * expected[i]) ** 2 / (count * expected[i]) for i in possible) < 25
    for token in possible:
        found = log_probs[tokens == token]
        torch.testing.assert_close(found, torch.full_like(found, math.log(expected[token])))


@given(
    logits=st.lists(st.floats(-30, 30, width=32) | st.just(-math.inf), min_size=1, max_size=12).filter(
        lambda row: max(row) > -math.inf
    ),
    draw=st.sampled_from([0.0, 2**-53, 0.5, BELOW_ONE]),
    top_p=st.sampled_from([1.0, 0.99, 0.5, 1e-6]),
)
def test_a_draw_always_falls_on_a_token_that_has_a_probability(
    logits: list[float], draw: float, top_p: float
) -> None:
    row = torch.tensor([logits])
    tokens, log_probs = sample(row, torch.tensor([draw], dtype=torch.float64), temperature=1.0, top_p=top_p)
    assert math.isfinite(logits[tokens.item()])
    assert -math.inf < log_probs.item() <= 1e-6


def test_the_ends_of_the_unit_interval_over_a_large_vocabulary() -> None:
    """150,000 probabilities do not add up to 1; the first and the last 1,000 tokens are impossible."""
    logits = torch.randn(1, 150_000, generator=torch.Generator().manual_seed(0))
    logits[:, :1000] = logits[:, -1000:] = -math.inf
    draws = torch.tensor([0.0, BELOW_ONE], dtype=torch.float64)
    tokens, log_probs = sample(logits.expand(2, -1), draws, temperature=1.0, top_p=1.0)
    assert tokens.tolist() == [1000, 148_999]
    assert log_probs.isfinite().all()


def test_temperature_0_takes_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0], [1.0, 0.0, -1.0]])
    tokens, log_probs = sample(logits, torch.tensor([BELOW_ONE, BELOW_ONE]), temperature=0.0, top_p=1.0)
    assert tokens.tolist() == [1, 0] and log_probs.tolist() == [0.0, 0.0]


def test_a_stream_is_a_function_of_its_name() -> None:
    stream = uniforms(1, 2, 3, 1000)
    torch.manual_seed(99)
    assert torch.equal(stream, uniforms(1, 2, 3, 1000))
    assert stream.dtype == torch.float64 and stream.min() >= 0 and stream.max() < 1
    # Longer or shorter, it begins alike: max_tokens does not change what comes before.
    assert torch.equal(stream[:10], uniforms(1, 2, 3, 10))


def test_streams_of_other_names_are_independent() -> None:
    # (1, 12, 3) and (11, 2, 3): names that would be equal if they were just written one after the other.
    names = [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (1, 12, 3), (11, 2, 3), (10**15, 2, 3)]
    streams = torch.stack([uniforms(*name, 4000) for name in names])
    correlation = torch.corrcoef(streams) - torch.eye(len(names), dtype=torch.float64)
    assert correlation.abs().max() < 4 / math.sqrt(4000)
    assert (streams.mean(1) - 0.5).abs().max() < 4 * math.sqrt(1 / 12 / 4000)
