"""The protocol of a rollout engine: the trainer asks this of anything that samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from megatron_fspo.types import Completion, Prompt, SamplingParams

Progress = Callable[[int], None]
"""Called with the number of completions that have just finished."""

Arrived = Callable[[int, Completion], None]
"""Called with a completion as soon as it has finished, and its number: position of the prompt among those of
all ranks x ``params.n`` + its number among the prompt's. It may be called in another thread, and must not
block."""


class Pending(Protocol):
    """Completions that were asked for."""

    def __call__(self, progress: Progress | None = None, *, stops: bool = False) -> list[list[Completion]]:
        """Wait for them: ``params.n`` completions of each prompt that is this rank's, in the order of the
        prompts. Once. Only the first rank of each copy of the model is sure to get them.

        Args:
            progress: hears of completions that have finished.
            stops: a request to stop the job may end the wait, as ``StopRequested`` on every rank. An engine
                that samples in this process goes on to the end.
        """
        ...


class RolloutEngine(Protocol):
    """A sampler whose weights follow the trainer's.

    Order of calls in a step: ``submit`` and collect … ``rest`` … train … ``update_weights``. Whatever else
    needs the trainer's weights, such as a checkpoint, comes after a ``rest`` too.
    """

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        mine: range | None = None,
        arrived: Arrived | None = None,
    ) -> Pending:
        """Ask for ``params.n`` completions of each prompt.

        Args:
            prompts: of all ranks.
            params: how to sample; the same for every prompt.
            mine: positions of those whose completions this data-parallel rank is to hold; default all.
            arrived: hears of each completion that this rank learns of at first hand. One of the first ranks
                of the model copies does so of each, not always the one that is to hold it.

        Several batches may be pending at once, and are collected in any order, the same on every rank. An
        engine that samples in this process does so only when they are collected.
        """
        ...

    def update_weights(self, version: int) -> None:
        """Make ``version`` the weights that sample from here on, and the version completions carry."""
        ...

    def rest(self) -> None:
        """Say that nothing is asked for until the next ``submit``: servers on the trainer's GPUs give up
        their memory, so that the trainer has all of its own again. Collective."""
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics of the last weight update, on the first rank."""
        ...

    def close(self) -> None:
        """Let go of what the engine holds outside this process."""
        ...
