"""``loss.unit = turn``: each turn is clipped by itself, and counts for its trajectory."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_fspo.losses import FSPOLoss
from megatron_fspo.objective.surrogate import LossInputs, TurnInputs

LOSS = FSPOLoss(c_low=0.05, c_high=0.05, unit="turn")
# Trajectory → its turns, each of so many tokens; what an environment inserted lies between them.
TURNS = [[3, 5], [4], [], [1, 2, 6]]


def trajectories(log_ratio: torch.Tensor) -> LossInputs:
    """All tokens that the policy wrote, each turn followed by one that it did not."""
    owner = torch.tensor([number for number, some in enumerate(TURNS) for _ in some])
    lengths = torch.tensor([length for some in TURNS for length in some])
    turn = torch.arange(len(lengths)).repeat_interleave(lengths + 1)
    last = (lengths + 1).cumsum(0) - 1
    mask = torch.ones(len(turn), dtype=torch.bool)
    mask[last] = False
    segment, turn = owner[turn], torch.where(mask, turn, len(lengths))

    def sums(places: torch.Tensor, count: int):  # type: ignore[no-untyped-def]
        def of(values: torch.Tensor) -> torch.Tensor:
            kept = torch.where(mask, values, 0.0)
            return kept.new_zeros(len(values), count + 1).index_add_(1, places, kept)[:, :count]

        return of

    return LossInputs(
        log_probs=torch.full_like(log_ratio, -1.0),
        log_ratio=log_ratio,
        loss_mask=mask,
        segment=segment,
        sequence_sums=sums(segment, len(TURNS)),
        prefix_sums=lambda values: values,
        lengths=torch.tensor([sum(some) for some in TURNS]),
        advantages=torch.tensor([1.0, -1.0, 1.0, 0.5], dtype=torch.float64),
        num_sequences=3,
        num_tokens=21,
        turns=TurnInputs(segment=turn, owner=owner, lengths=lengths, sums=sums(turn, len(lengths))),
    )


def ratios(seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = sum(length + 1 for some in TURNS for length in some)
    return 0.1 * torch.randn(count, generator=generator, dtype=torch.float64)


def test_it_is_the_loss_of_turns_as_sequences_of_their_own() -> None:
    inputs = trajectories(ratios())
    turns = inputs.turns
    assert turns is not None
    alone = replace(
        inputs,
        segment=turns.segment,
        sequence_sums=turns.sums,
        lengths=turns.lengths,
        advantages=inputs.advantages[turns.owner],
        turns=None,
    )
    terms, want = LOSS.objective()(inputs), LOSS.objective()(alone)
    assert torch.equal(terms.weight, want.weight) and torch.equal(terms.objective, want.objective)
    clipped = want.clipped_low + want.clipped_high + want.dual_clipped
    assert 0 < clipped.sum() < len(clipped)
    torch.testing.assert_close(terms.log_ratio_sum, inputs.sequence_sums(inputs.log_ratio[None])[0])
    for number in range(len(TURNS)):
        own = turns.owner == number
        share = clipped[own].mean().item() if own.any() else 0.0
        got = terms.clipped_low + terms.clipped_high + terms.dual_clipped
        assert abs(got[number].item() - share) < 1e-12
    whole = FSPOLoss(c_low=0.05, c_high=0.05).objective()(inputs)
    assert not torch.equal(terms.weight, whole.weight)


def test_a_turn_that_is_not_finite_drops_its_trajectory_and_no_other() -> None:
    log_ratio = ratios()
    before = LOSS.objective()(trajectories(log_ratio.clone()))
    log_ratio[5] = torch.nan  # of the second turn of the first trajectory
    terms = LOSS.objective()(trajectories(log_ratio))
    assert terms.nonfinite.tolist() == [True, False, False, False]
    first = trajectories(log_ratio).segment == 0
    assert not terms.weight[first].any() and torch.equal(terms.weight[~first], before.weight[~first])
    assert torch.isfinite(terms.objective)
