"""Dynamic sampling (DAPO, arXiv 2503.14476): a batch of groups that teach something.

A group whose rewards are all equal has advantages of 0 and no gradient. Such groups are replaced by those of
further prompts, sampled in rounds by the present weights, until the batch is full or the rounds are used up.
Groups are taken in the order of their prompts, and every round is waited for to its last response, so that
neither is who stays.

All that is decided here follows from what every rank has alike: lengths of lists, and whose advantages are 0,
which is one rank's word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_fspo.trainer.rollout import Rollout, join, select

Round = Callable[[int, int], Rollout]
"""``(number, prompts)`` → responses to so many further prompts, with their advantages. Numbers count from 1;
the batch that the step began with is round 0. Collective."""


@dataclass(frozen=True, kw_only=True)
class Filled:
    """The batch of a step, and what it was chosen from."""

    batch: Rollout
    """As many groups as the first round had."""
    sampled: Rollout
    """All groups of all rounds."""
    rounds: int

    @property
    def unfilled(self) -> int:
        """Groups of the batch without spread."""
        return int((~self.batch.spread).sum())

    def __str__(self) -> str:
        return (
            f"{self.unfilled} of {len(self.batch.prompts)} groups have no spread after "
            f"{self.rounds} rounds with {len(self.sampled.prompts)} prompts (rollout.max_rounds)"
        )

    def metrics(self) -> dict[str, float]:
        """Under ``rollout/dynamic/``: ``rounds`` and ``prompts_sampled``, the first round included; of their
        groups ``groups_dropped`` for want of spread and ``groups_surplus``, with spread but too late;
        ``unfilled``, groups of the batch without spread; and rewards and lengths of the batch."""
        spread, kept = int(self.sampled.spread.sum()), int(self.batch.spread.sum())
        sampled = len(self.sampled.prompts)
        numbers = {
            "rounds": self.rounds,
            "prompts_sampled": sampled,
            "groups_dropped": sampled - spread - self.unfilled,
            "groups_surplus": spread - kept,
            "unfilled": self.unfilled,
            "batch_rewards/mean": self.batch.rewards.mean().item(),
            "batch_response_length/mean": self.batch.lengths.double().mean().item(),
        }
        return {f"rollout/dynamic/{name}": float(value) for name, value in numbers.items()}


def fill(first: Rollout, further: Round, *, max_rounds: int) -> Filled:
    """Sample further prompts until as many groups as the first round has have a spread. Collective.

    Args:
        max_rounds: at most, the first included. If they do not suffice, groups without spread stay in the
            batch: its size, and so N and the number of optimizer steps, is the same in every step.
    """
    size = len(first.prompts)
    parts, found, sampled = [first], int(first.spread.sum()), size
    while found < size and len(parts) < max_rounds:
        count = prompts_to_ask(size - found, found, sampled, limit=size)
        parts.append(further(len(parts), count))
        found += int(parts[-1].spread.sum())
        sampled += count
    together = join(parts)
    return Filled(
        batch=select(together, choose(together.spread.tolist(), size)), sampled=together, rounds=len(parts)
    )


def prompts_to_ask(missing: int, found: int, sampled: int, *, limit: int) -> int:
    """How many prompts will give ``missing`` groups with spread, if ``found`` of ``sampled`` did."""
    return min(limit, -(-missing * sampled // found)) if found else limit


def choose(spread: list[bool], size: int) -> list[int]:
    """``size`` of the groups: the first ones with spread; if they are too few, also the first ones without.

    Returns:
        their numbers, ascending: those without are among the others and not in one mini-batch.
    """
    order = sorted(range(len(spread)), key=lambda group: not spread[group])
    return sorted(order[:size])
