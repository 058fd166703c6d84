"""Returns the responses that the data set gives, in place of a sampler: supervised training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_fspo.rollout.engine import Arrived, Pending, Progress
from megatron_fspo.types import Completion, Prompt, SamplingParams


class Demonstrations:
    """A :class:`~megatron_fspo.rollout.engine.RolloutEngine` whose prompts have a ``demonstration`` each."""

    def __init__(self) -> None:
        self._version = 0

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        mine: range | None = None,
        arrived: Arrived | None = None,
    ) -> Pending:
        """See the protocol. Every prompt has one completion."""

        def collect(progress: Progress | None = None, *, stops: bool = False) -> list[list[Completion]]:
            given = [prompts[n].demonstration for n in (range(len(prompts)) if mine is None else mine)]
            return [[replace(one, weight_version=self._version)] for one in given if one is not None]

        return collect

    def update_weights(self, version: int) -> None:
        """Set the version with which responses are labelled."""
        self._version = version

    def rest(self) -> None:
        """Do nothing."""

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Do nothing."""
