"""What the trainer asks of anything that samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from megatron_fspo.types import Completion, Prompt, SamplingParams

Progress = Callable[[int], None]
"""Called with the number of completions that have just finished."""


class RolloutEngine(Protocol):
    """A sampler whose weights follow the trainer's.

    Order of calls in a step: ``generate`` … train … ``pause``, ``update_weights``, ``resume``.
    """

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, progress: Progress | None = None
    ) -> list[list[Completion]]:
        """``params.n`` completions of each prompt, in the order of the prompts."""
        ...

    def update_weights(self, version: int) -> None:
        """Make ``version`` the weights that sample from here on, and the version completions carry."""
        ...

    def pause(self) -> None:
        """Finish or hold what is under way; ``generate`` is refused until :meth:`resume`."""
        ...

    def resume(self) -> None:
        """Take work again."""
        ...

    def metrics(self) -> dict[str, float]:
        """Of the last weight update, on the first rank."""
        ...

    def close(self) -> None:
        """Let go of what the engine holds outside this process."""
        ...
