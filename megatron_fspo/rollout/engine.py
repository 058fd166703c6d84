"""The protocol of a rollout engine, which samples completions for the trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from megatron_fspo.types import Completion, Prompt, SamplingParams

Progress = Callable[[int], None]
"""Called with the number of completions that have just finished."""

Arrived = Callable[[int, Completion], None]
"""Called with the number of a completion, and the completion, as soon as it has finished. The number is
(position of its prompt among those of all ranks) × ``params.n`` + (its number among the prompt's). May be
called in another thread, and must not block."""


class Pending(Protocol):
    """A batch of requested completions."""

    def __call__(self, progress: Progress | None = None, *, stops: bool = False) -> list[list[Completion]]:
        """Wait, and return ``params.n`` completions of each of this rank's prompts, in order. Call it once.
        Only the first rank of each model replica is guaranteed to get the completions.

        Args:
            progress: called as completions finish.
            stops: a request to stop the job may end the wait by ``StopRequested`` on every rank. An engine
                that samples in this process ignores it.
        """
        ...


class RolloutEngine(Protocol):
    """A sampler whose weights follow the trainer's.

    Order of calls in a step: ``submit``, collect, ``rest``, train, ``update_weights``. Call ``rest`` before
    any other use of the trainer's weights too, such as saving a checkpoint.
    """

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        mine: range | None = None,
        arrived: Arrived | None = None,
    ) -> Pending:
        """Request ``params.n`` completions of each prompt.

        Several batches may be pending. They may be collected in any order that is the same on every rank. An
        engine that samples in this process does so only when a batch is collected.

        Args:
            prompts: prompts of all ranks.
            params: sampling parameters, for all prompts.
            mine: positions of the prompts whose completions this data-parallel rank receives; default: all.
            arrived: called for each completion that this rank gets from the sampler itself. The first rank of
                some model replica gets the call, not always of the copy that receives the completion.
        """
        ...

    def update_weights(self, version: int) -> None:
        """Sample with the trainer's current weights from now on, and label them ``version``."""
        ...

    def rest(self) -> None:
        """Declare that no request follows until the next ``submit``. Servers on the trainer's GPUs release
        their memory for the trainer. Collective."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last weight update, on the first rank."""
        ...

    def close(self) -> None:
        """Release resources outside this process."""
        ...
