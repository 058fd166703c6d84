"""Laws of the sequence surrogate that hold for any input."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_fspo.objective import (
    ConstantDualClip,
    FSPOBand,
    GSPOBand,
    LengthFairDualClip,
    RLOOBand,
    sequence_surrogate,
)

LAWS = settings(deadline=None, max_examples=100, derandomize=True, database=None)
FLAGS = ("clipped_low", "clipped_high", "dual_clipped", "below", "above", "nonfinite")

bands = st.sampled_from(
    [
        FSPOBand(c_low=0.05, c_high=0.05),
        FSPOBand(c_low=0.03, c_high=0.2, drift=-0.001),
        RLOOBand(eps_low=0.2, eps_high=0.28),
        GSPOBand(eps_low=3e-3, eps_high=4e-3),
    ]
)
dual_clips = st.sampled_from([None, LengthFairDualClip(c=0.4), ConstantDualClip(ratio=3.0)])


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """S, L, A in float64. S has the scale of the bands, so that both sides of each limit are drawn."""
    size = draw(st.integers(1, 12))
    lengths = draw(st.lists(st.integers(1, 4096), min_size=size, max_size=size))
    per_root = draw(st.lists(st.floats(-1.0, 1.0), min_size=size, max_size=size))
    advantages = draw(st.lists(st.floats(-3, 3).map(lambda a: round(a, 2)), min_size=size, max_size=size))
    length = torch.tensor(lengths)
    s = torch.tensor(per_root, dtype=torch.float64) * length.double().sqrt()
    return s, length, torch.tensor(advantages, dtype=torch.float64)


@LAWS
@given(batches(), bands, dual_clips)
def test_a_flag_and_a_zero_weight_go_together(batch, band, dual) -> None:
    s, lengths, advantages = batch
    got = sequence_surrogate(s, lengths, advantages, band, dual)
    assert not got.nonfinite.any()
    assert torch.equal(got.weight == 0, got.clipped | (advantages == 0))
    assert not (got.clipped & (advantages == 0)).any()
    assert (got.clipped_low.int() + got.clipped_high.int() + got.dual_clipped.int() <= 1).all()
    low, high = band.bounds(lengths.double())
    assert torch.equal(got.below, s < low) and torch.equal(got.above, s > high)
    assert torch.equal(got.out_of_band, (s < low) | (s > high))


@LAWS
@given(batches(), bands, dual_clips)
def test_the_objective_is_pessimistic_and_the_dual_clip_bounds_it(batch, band, dual) -> None:
    s, lengths, advantages = batch
    scale = band.log_ratio_scale(lengths.double())
    plain = sequence_surrogate(s, lengths, advantages, band)
    unclipped = (scale * s).exp() * advantages
    slack = 1e-12 * unclipped.abs()
    assert (plain.objective <= unclipped + slack).all()
    if dual is not None:
        floor = (scale * dual.log_bound(lengths.double(), scale)).exp() * advantages
        got = sequence_surrogate(s, lengths, advantages, band, dual)
        negative = advantages < 0
        assert (got.objective >= floor - 1e-12 * floor.abs())[negative].all()
        assert (got.objective >= plain.objective).all()
        assert torch.equal(got.objective[~negative], plain.objective[~negative])


@LAWS
@given(batches(), st.integers(1, 4), st.booleans())
def test_scale_law_of_the_square_root_band(batch, power, with_dual) -> None:
    """k times the length and √k times S: no flag changes. k = 4^p makes √k, and so the law, exact."""
    s, lengths, advantages = batch
    s = s / 8  # at most 128 nats after scaling: exp does not overflow
    band, dual = FSPOBand(c_low=0.03, c_high=0.05), LengthFairDualClip(c=0.08) if with_dual else None
    before = sequence_surrogate(s, lengths, advantages, band, dual)
    after = sequence_surrogate(s * 2**power, lengths * 4**power, advantages, band, dual)
    for name in FLAGS:
        assert torch.equal(vars(before)[name], vars(after)[name]), name


@LAWS
@given(batches())
def test_flipping_s_and_a_swaps_low_and_high(batch) -> None:
    s, lengths, advantages = batch
    band = FSPOBand(c_low=0.05, c_high=0.05)
    got = sequence_surrogate(s, lengths, advantages, band)
    flipped = sequence_surrogate(-s, lengths, -advantages, band)
    assert torch.equal(got.clipped_low, flipped.clipped_high)
    assert torch.equal(got.clipped_high, flipped.clipped_low)
    assert torch.equal(got.below, flipped.above)


@LAWS
@given(batches(), bands, dual_clips, st.randoms(use_true_random=False))
def test_sequences_do_not_see_each_other(batch, band, dual, random) -> None:
    order = list(range(len(batch[0])))
    random.shuffle(order)
    got = sequence_surrogate(*batch, band, dual)
    shuffled = sequence_surrogate(*(column[order] for column in batch), band, dual)
    for name, column in vars(got).items():
        assert torch.equal(column[order], vars(shuffled)[name]), name


def test_clipping_the_mean_at_c_over_root_l_is_another_method() -> None:
    """c/√L on S/L decides exactly as c·√L on S does, and still gives another weight and another update."""

    class MeanBand(FSPOBand):
        def log_ratio_scale(self, lengths: Tensor) -> Tensor:
            return 1.0 / lengths

    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 2000, (400,), generator=generator)
    s = 0.06 * lengths.double().sqrt() * torch.randn(400, dtype=torch.float64, generator=generator)
    advantages = torch.randn(400, dtype=torch.float64, generator=generator)
    fspo = sequence_surrogate(s, lengths, advantages, FSPOBand(c_low=0.06, c_high=0.06))
    mean = sequence_surrogate(s, lengths, advantages, MeanBand(c_low=0.06, c_high=0.06))

    threshold = 0.06 / lengths.double().sqrt()
    assert torch.equal(mean.above, s / lengths > threshold) and 50 < mean.clipped.sum() < 350
    for name in FLAGS:
        assert torch.equal(vars(fspo)[name], vars(mean)[name]), name

    kept = ~fspo.clipped
    expected = (s * (1 - 1 / lengths.double())).exp() * lengths
    torch.testing.assert_close((fspo.weight / mean.weight)[kept], expected[kept])
    # Not one method with another learning rate: the updates point elsewhere.
    per_sequence = torch.randn(400, 1000, dtype=torch.float64, generator=generator)
    updates = torch.stack([fspo.weight, mean.weight]) @ (per_sequence * lengths.double().sqrt()[:, None])
    assert torch.cosine_similarity(updates[0], updates[1], dim=0) < 0.9
