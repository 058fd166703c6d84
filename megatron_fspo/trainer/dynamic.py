"""Dynamic sampling (DAPO, arXiv 2503.14476): a batch of groups whose rewards differ, from several rounds.

Groups whose rewards are all equal have no gradient. They are replaced by groups of further prompts, sampled
in rounds by the current weights, until the batch is full or the rounds are used up. Groups are taken in the
order of their prompts, after all responses of a round are complete, so that the choice does not depend on
speed. All ranks make the same choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megatron_fspo.trainer.rollout import Rollout, join, select


class Filled(NamedTuple):
    """The batch of a step, chosen from several rounds."""

    batch: Rollout
    """As many groups as the first round had."""
    sampled: Rollout
    """All groups of all rounds."""
    metrics: dict[str, float]
    """Under ``rollout/dynamic/``: ``rounds`` and ``prompts_sampled`` include the first round;
    ``groups_dropped`` had zero variance; ``groups_surplus`` had not, but the batch was full; ``unfilled`` are
    the zero-variance groups of the batch; rewards and lengths are means over the batch."""
    unfilled: str
    """Line for the log if the batch has zero-variance groups, else empty."""


def fill(first: Rollout, further: Callable[[int, int], Rollout], *, max_rounds: int) -> Filled:
    """Sample further prompts until the batch, of the first round's size, has no zero-variance groups.
    Collective.

    Args:
        first: the first round.
        further: ``(round number from 1, number of prompts)`` → responses with advantages. Collective.
        max_rounds: maximum number of rounds, including the first. If they do not suffice, zero-variance
            groups stay in the batch, so that its size is the same in every step.
    """
    size = len(first.prompts)
    rounds, full, sampled = [first], int(first.has_variance.sum()), size
    while full < size and len(rounds) < max_rounds:
        # Enough to fill the batch if the share of zero-variance groups stays the same.
        count = min(size, -(-(size - full) * sampled // full)) if full else size
        rounds.append(further(len(rounds), count))
        full += int(rounds[-1].has_variance.sum())
        sampled += count
    together = join(rounds)
    has_variance = together.has_variance.tolist()
    # If too few groups have variance, add the first ones without; in prompt order, to mix the mini-batches.
    chosen = sorted(range(sampled), key=lambda group: not has_variance[group])[:size]
    batch = select(together, sorted(chosen))
    unfilled = max(size - full, 0)
    numbers = {
        "rounds": len(rounds),
        "prompts_sampled": sampled,
        "groups_dropped": sampled - full - unfilled,
        "groups_surplus": max(full - size, 0),
        "unfilled": unfilled,
        "batch_rewards/mean": batch.rewards.mean().item(),
        "batch_response_length/mean": batch.lengths.double().mean().item(),
    }
    text = (
        f"{unfilled} of {size} groups have zero variance after {len(rounds)} rounds with {sampled} prompts "
        "(rollout.max_rounds)"
    )
    metrics = {f"rollout/dynamic/{name}": float(value) for name, value in numbers.items()}
    return Filled(batch, together, metrics, text if unfilled else "")
