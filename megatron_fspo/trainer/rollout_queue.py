"""Which prompts are next, and how far ahead of the trainer they are asked.

The batch of step k is trained on weights k. With ``rollout.max_staleness`` = K the batches up to k + K are
asked for before step k trains, and sampled meanwhile: no token is from weights older than K versions when it
is learned from. K = 0 is the synchronous algorithm. Further prompts of step k are asked for at its turn, and
sampled by weights k.

Batches are made of prompts in their order and waited for to the last response. To train on whoever is done
first would favour short responses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from megatron_fspo.data.cursor import PromptCursor
from megatron_fspo.errors import TrainingError
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.rewards import Grader
from megatron_fspo.rollout.engine import RolloutEngine
from megatron_fspo.trainer.prepare import Inputs
from megatron_fspo.trainer.rollout import Rollout
from megatron_fspo.trainer.sampling import Batch, ask
from megatron_fspo.types import SamplingParams


class RolloutQueue:
    """Batches that were asked for and are still to be learned from.

    Args:
        step: the first to ask for.
    """

    def __init__(
        self,
        inputs: Inputs,
        engine: RolloutEngine,
        groups: ParallelGroups,
        grader: Grader | None,
        prompts: PromptCursor,
        step: int,
    ) -> None:
        self._inputs = inputs
        self._engine = engine
        self._groups = groups
        self._grader = grader
        self._prompts = prompts
        self._next = step
        self._asked: deque[Batch] = deque()

    def take(self, step: int) -> Batch:
        """The batch of this step. Collective."""
        self._ask_until(step)
        self._prompts.close()
        return self._asked.popleft()

    def further(self, step: int, number: int, prompts: int) -> Batch:
        """Ask for so many prompts more, in a further round of the step under way. Collective.

        Args:
            number: of the round: 1 after the batch itself.
        """
        return self._ask(self._prompts.further(prompts), self._params(step, number))

    def ask(self, step: int) -> None:
        """Ask for all that may be sampled while this step trains. Collective."""
        config = self._inputs.config
        self._ask_until(min(step + config.rollout.max_staleness, config.run.steps - 1))

    def state_dict(self) -> dict[str, Any]:
        """The state of the prompt cursor to resume with: what was only asked for is asked for again."""
        return self._prompts.state_dict()

    def _ask_until(self, step: int) -> None:
        while self._next <= step:
            self._asked.append(self._ask(self._prompts.batch(), self._params(self._next)))
            self._next += 1

    def _ask(self, indices: Sequence[int], params: SamplingParams) -> Batch:
        prompts = [self._inputs.train[i] for i in indices]
        return ask(self._inputs, self._engine, self._groups, self._grader, prompts, params)

    def _params(self, step: int, number: int = 0) -> SamplingParams:
        rollout = self._inputs.config.rollout
        return SamplingParams(
            n=rollout.samples,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            max_tokens=rollout.max_response_tokens,
            stop_token_ids=self._inputs.stop_token_ids,
            stop=rollout.stop,
            decode=self._inputs.decode,
            # A prompt that comes again in a later step, or in a later round, gets other responses.
            seed=self._inputs.config.run.seed * 1_000_000_007 + step + (number << 64),
        )


def staleness_metrics(rollout: Rollout, step: int, *, limit: int) -> dict[str, float]:
    """How many versions older than the trainer's the weights were that sampled.

    Returns:
        ``rollout/staleness/mean`` over tokens and ``/max``; ``rollout/partial``: share of responses that an
        update met half-way, so that several versions wrote them.

    Raises:
        TrainingError: a token is older than ``limit`` versions.
    """
    tokens = int(rollout.lengths.sum())
    oldest = step - int(rollout.oldest_version.min())
    if oldest > limit:
        raise TrainingError(
            f"step {step + 1}: a response is from weights {oldest} versions old, "
            f"rollout.max_staleness = {limit}"
        )
    return {
        "rollout/staleness/mean": (step * tokens - int(rollout.version_tokens.sum())) / max(tokens, 1),
        "rollout/staleness/max": float(oldest),
        "rollout/partial": (rollout.spans > 1).double().mean().item(),
    }
