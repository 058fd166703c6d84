"""The responses of one step: what every rank knows of them, and the tokens, which few ranks hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_fspo.rewards import Grade
from megatron_fspo.types import Completion, Prompt, VersionSpan

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """n responses, ``samples`` to each prompt, prompt by prompt. Tensors are [n], on the CPU, and the same on
    every rank."""

    prompts: Sequence[Prompt]
    samples: int
    lengths: Tensor
    """int64, tokens of the response, the stop token included."""
    rewards: Tensor
    """float64: what is learned from."""
    scores: Tensor
    """float64: the first reward's verdict alone, what accuracy is made of."""
    advantages: Tensor
    """float64; NaN until they are known."""
    truncated: Tensor
    """bool: cut off at the longest length that was asked for."""
    oldest_version: Tensor
    """int64, of the weights that sampled any of it."""
    version_tokens: Tensor
    """int64, Σ over its tokens of the version that sampled them."""
    spans: Tensor
    """int64, how many versions sampled it."""
    last_version: Tensor
    """int64, of the weights that sampled its end."""
    last_start: Tensor
    """int64, where in the response their tokens begin."""
    owner: Tensor
    """int64, the data-parallel rank that holds its tokens."""
    held: Mapping[int, Completion]
    """What this rank holds, by number: on the first rank of each model copy; others hold nothing."""
    verdicts: Mapping[int, Grade]
    """What this rank graded, by number; not always what it holds."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def prompt_lengths(self) -> Tensor:
        """[n] int64."""
        return torch.tensor([len(prompt.token_ids) for prompt in self.prompts]).repeat_interleave(
            self.samples
        )

    @property
    def spread(self) -> Tensor:
        """[prompts] bool: the group teaches something, as not all of its advantages are 0."""
        return (self.advantages.view(-1, self.samples) != 0).any(1)

    def name(self, number: int) -> str:
        """Which response, for messages."""
        prompt = self.prompts[number // self.samples]
        return f"prompt {prompt.index}, response {number % self.samples}"

    def fresh_from(self, version: int) -> Tensor:
        """[n] position in prompt and response from which on all that follows was sampled by these weights."""
        first = torch.where(self.last_version == version, self.last_start, self.lengths)
        return self.prompt_lengths - 1 + first


COLUMNS = (
    *("lengths", "truncated", "oldest_version", "version_tokens"),
    *("spans", "last_version", "last_start", "owner"),
    *("rewards", "scores"),
)
"""Fields of the table that ranks make together: those that :func:`describe` gives, in its order, then
:data:`GRADES`."""
GRADES = 2
"""How many of them whoever grades fills in."""
_PER_RESPONSE = (*COLUMNS, "advantages")
_TYPES = {"rewards": torch.float64, "scores": torch.float64, "truncated": torch.bool}


def describe(completion: Completion, owner: int) -> tuple[float, ...]:
    """One response as numbers, without its grades; integers stay exact in float64."""
    length = len(completion.token_ids)
    whole = VersionSpan(version=completion.weight_version, start=0, end=length)
    spans = completion.version_spans or (whole,)
    return (
        length,
        completion.finish_reason == "length",
        completion.weight_version,
        sum(span.version * (span.end - span.start) for span in spans),
        len(spans),
        spans[-1].version,  # versions only grow
        spans[-1].start,
        owner,
    )


def rollout_of(
    prompts: Sequence[Prompt],
    samples: int,
    table: Tensor,
    held: Mapping[int, Completion],
    verdicts: Mapping[int, Grade] | None = None,
) -> Rollout:
    """From a table [n, columns] with the fields of :data:`COLUMNS`; advantages are still to come."""
    columns = {
        name: column.to(_TYPES.get(name, torch.long))
        for name, column in zip(COLUMNS, table.unbind(1), strict=True)
    }
    unknown = torch.full((len(table),), float("nan"), dtype=torch.float64)
    return Rollout(
        prompts=prompts, samples=samples, held=held, verdicts=verdicts or {}, advantages=unknown, **columns
    )


def with_advantages(rollout: Rollout, advantages: Tensor) -> Rollout:
    """The same, with [prompts, samples] advantages."""
    return replace(rollout, advantages=advantages.flatten().double())


def without_tokens(rollout: Rollout) -> Rollout:
    """The same, once its tokens are in packs and its verdicts counted."""
    return replace(rollout, held={}, verdicts={})


def join(parts: Sequence[Rollout]) -> Rollout:
    """The groups of several rollouts, one rollout after the other, each response with whoever holds it.

    Raises:
        ValueError: no parts, or groups of different sizes.
    """
    if len({part.samples for part in parts}) != 1:
        raise ValueError(f"rollouts with groups of {[part.samples for part in parts]} do not join")
    starts = list(accumulate(map(len, parts), initial=0))
    columns: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts]) for name in _PER_RESPONSE
    }
    return replace(
        parts[0],
        prompts=[prompt for part in parts for prompt in part.prompts],
        held=_renumbered([part.held for part in parts], starts),
        verdicts=_renumbered([part.verdicts for part in parts], starts),
        **columns,
    )


def _renumbered(parts: Sequence[Mapping[int, T]], starts: Sequence[int]) -> dict[int, T]:
    return {
        start + number: item
        for part, start in zip(parts, starts, strict=False)
        for number, item in part.items()
    }


def select(rollout: Rollout, groups: Sequence[int]) -> Rollout:
    """Some groups of a rollout, in this order; their responses are numbered anew."""
    n = rollout.samples
    numbers = [group * n + i for group in groups for i in range(n)]
    columns: dict[str, Any] = {name: getattr(rollout, name)[numbers] for name in _PER_RESPONSE}
    return replace(
        rollout,
        prompts=[rollout.prompts[group] for group in groups],
        held={new: rollout.held[old] for new, old in enumerate(numbers) if old in rollout.held},
        verdicts={new: rollout.verdicts[old] for new, old in enumerate(numbers) if old in rollout.verdicts},
        **columns,
    )
