"""A completion in progress: the policy's turns, and the tokens that an environment inserts between them.

Tokens are only appended. The policy's tokens are never decoded and encoded again, which might change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from megatron_fspo.errors import TrainingError
from megatron_fspo.types import Completion, Environment, Prompt, Reply, SamplingParams, VersionSpan


def silent(environment: Environment, index: int) -> TrainingError:
    """Return the error for an environment that has owed replies for too long, to prompt ``index`` among
    others."""
    name, seconds = type(environment).__name__, environment.limit_seconds
    return TrainingError(f"{name} has sent no reply for {seconds:g} s, to prompt {index} for example")


@dataclass(eq=False)
class Trajectory:
    """State of a completion. Engines append single tokens, or whole turns with :meth:`add`."""

    prompt: Prompt
    params: SamplingParams
    _: KW_ONLY
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    """None: the policy is writing, or the environment has to reply."""
    turn_start: int = 0
    """Start of the current or last turn in ``token_ids``."""
    context: tuple[int, ...] = ()
    """First tokens of the current row: the prompt, or a reply that restarted the context."""
    row_start: int = 0
    """Start of the row's further tokens in ``token_ids``."""
    row_starts: list[int] = field(default_factory=list)
    """See :class:`~megatron_fspo.types.Completion`."""
    _written: list[range] = field(default_factory=list)
    _spans: list[VersionSpan] = field(default_factory=list)
    _failures: int = 0
    _seconds: float = 0.0
    _last: dict[str, Any] = field(default_factory=dict)
    """Further fields of the completion."""

    def __post_init__(self) -> None:
        self.context = self.prompt.token_ids

    @property
    def read(self) -> tuple[int, ...]:
        """All tokens of the current row: the context of the next token."""
        return (*self.context, *self.token_ids[self.row_start :])

    @property
    def turn_limit(self) -> int:
        """Maximum length of the current turn in tokens; 0 or less: there is no room for a turn."""
        params, before = self.params, len(self.context) + self.turn_start - self.row_start
        room = params.max_tokens if params.context_tokens is None else params.context_tokens - before
        return min(params.max_tokens - self.turn_start, room, params.turn_tokens or params.max_tokens)

    @property
    def turns(self) -> list[Sequence[int]]:
        """Token ids of the completed turns."""
        return [self.token_ids[turn.start : turn.stop] for turn in self._written]

    def end_turn(self, reason: Literal["stop", "length"]) -> bool:
        """End the current turn. Return True if the environment has to reply, for :meth:`take`."""
        self._written.append(range(self.turn_start, len(self.token_ids)))
        if reason == "stop" and self.params.environment is not None:
            return True
        self.finish_reason = reason
        return False

    def add(self, turn: Completion) -> bool:
        """Append a turn that was sampled as a completion of :attr:`read`. Return as :meth:`end_turn`."""
        start = len(self.token_ids)
        self.token_ids += turn.token_ids
        self.log_probs += turn.log_probs
        for span in turn.spans:
            self._spans.append(replace(span, start=span.start + start, end=span.end + start))
        self._last = {"routes": turn.routes, "route_problem": turn.route_problem}
        return self.end_turn(turn.finish_reason)

    def take(self, reply: Reply) -> None:
        """Insert the environment's reply and begin the next turn, or end the trajectory."""
        self._failures += reply.failed
        self._seconds += reply.seconds
        if reply.token_ids is None:
            self.finish_reason = "stop"
            self._last["reward"] = reply.reward
            return
        start = len(self.token_ids)
        self.token_ids += reply.token_ids
        self.log_probs += [0.0] * len(reply.token_ids)
        self.turn_start = len(self.token_ids)
        if reply.restarts:
            self.context, self.row_start = reply.token_ids, self.turn_start
        if self.turn_limit < 1 or len(self._written) == self.params.turns:  # no turn would read it
            self.finish_reason = "length"
            del self.token_ids[start:], self.log_probs[start:]
        elif reply.restarts:
            self.row_starts.append(start)

    def completion(self, version: int | None = None) -> Completion:
        """Return the finished completion. ``version``: weight version of all its tokens, if given."""
        assert self.finish_reason is not None
        spans: list[VersionSpan] = []
        for span in self._spans:
            last = spans[-1:]  # extended by the same version, else up to this span, over inserted tokens
            if last and last[0].version == span.version:
                spans[-1] = replace(last[0], end=span.end)
                continue
            spans[-1:] = [*(replace(before, end=span.start) for before in last), span]
        mask = bytearray(len(self.token_ids))
        for turn in self._written:
            mask[turn.start : turn.stop] = b"\1" * len(turn)
        joined = (after.start for turn, after in pairwise(self._written) if turn.stop == after.start)
        return Completion(
            token_ids=self.token_ids,
            log_probs=self.log_probs,
            loss_mask=mask,
            turn_starts=tuple(joined),
            row_starts=tuple(self.row_starts),
            finish_reason=self.finish_reason,
            weight_version=min(span.version for span in spans) if version is None else version,
            version_spans=tuple(spans),
            failures=self._failures,
            environment_seconds=self._seconds,
            **self._last,
        )
