import math

import pytest
import torch

from megatron_fspo.objective import (
    ConstantDualClip,
    RLOOBand,
    Surrogate,
    aggregation_weight,
    sequence_surrogate,
)


def tokens(log_ratio: torch.Tensor, advantages: torch.Tensor, dual: float | None = None) -> Surrogate:
    """Tokens are sequences of one token."""
    band = RLOOBand(eps_low=0.2, eps_high=0.28)
    dual_clip = None if dual is None else ConstantDualClip(ratio=dual)
    return sequence_surrogate(log_ratio, torch.ones_like(log_ratio), advantages, band, dual_clip)


def test_tokens_by_hand() -> None:
    log_ratio = torch.tensor([0.1, 0.3, 0.3, -0.3, -0.3, 2.0, 0.1], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, -1.0, 0.0], dtype=torch.float64)
    got = tokens(log_ratio, advantages, 3.0)
    e = math.exp
    assert got.objective.tolist() == pytest.approx([e(0.1), 1.28, -e(0.3), -0.8, e(-0.3), -3.0, 0.0])
    assert got.weight.tolist() == pytest.approx([e(0.1), 0.0, -e(0.3), 0.0, e(-0.3), 0.0, 0.0])
    assert got.clipped_high.nonzero().flatten().tolist() == [1]
    assert got.clipped_low.nonzero().flatten().tolist() == [3]
    assert got.dual_clipped.nonzero().flatten().tolist() == [5]
    assert got.above.nonzero().flatten().tolist() == [1, 2, 5]


def test_a_non_finite_token_is_reported_alone() -> None:
    log_ratio = torch.tensor([0.1, math.nan, math.inf, 200.0, 200.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0])
    got = tokens(log_ratio, advantages)
    assert got.nonfinite.tolist() == [False, True, True, True, False]
    assert got.weight.tolist() == pytest.approx([math.exp(0.1), 0.0, 0.0, 0.0, 0.0])
    assert got.objective.tolist() == pytest.approx([math.exp(0.1), 0.0, 0.0, 0.0, 1.28])


def test_aggregation_is_the_mean_it_names() -> None:
    lengths = [1, 10, 100, 1000]
    values = torch.randn(sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    of_token = torch.tensor([n for n in lengths for _ in range(n)]).double()

    by_sequence = aggregation_weight("sequence-mean", of_token, num_sequences=4, num_tokens=1111)
    expected = torch.stack([part.mean() for part in values.split(lengths)]).mean()
    torch.testing.assert_close((by_sequence * values).sum(), expected)

    by_token = aggregation_weight("token-mean", of_token, num_sequences=4, num_tokens=1111)
    torch.testing.assert_close((by_token * values).sum(), values.mean())


@pytest.mark.parametrize("kind", ["sequence-mean", "token-mean"])
def test_tokens_of_no_response_weigh_nothing(kind) -> None:
    weight = aggregation_weight(kind, torch.tensor([2, 2, 0]), num_sequences=1, num_tokens=2)
    assert weight.tolist() == [0.5, 0.5, 0.0] and weight.dtype == torch.float32


def test_wrong_input_is_refused() -> None:
    two = torch.zeros(2)
    with pytest.raises(ValueError, match='"sequence-mean" or "token-mean", got \'mean\''):
        aggregation_weight("mean", two, num_sequences=1, num_tokens=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1, got 0 and 5"):
        aggregation_weight("token-mean", two, num_sequences=0, num_tokens=5)
