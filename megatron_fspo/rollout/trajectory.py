"""A completion while it is written: the policy's turns, and what an environment inserts between them.

Tokens are only ever added. What a policy wrote is never written again through a tokenizer, whose tokens might
be others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal

from megatron_fspo.types import Completion, Prompt, Reply, SamplingParams, VersionSpan


@dataclass(eq=False)
class Trajectory:
    """Both engines write it: one token after the other, or a turn at a time by :meth:`add`."""

    prompt: Prompt
    params: SamplingParams
    _: KW_ONLY
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    """None: the policy writes, or the environment is asked."""
    turn_start: int = 0
    """Where the turn under way, or the last one, begins."""
    context: tuple[int, ...] = ()
    """The tokens that the row under way begins with: the prompt's, or those of a reply that restarts."""
    row_start: int = 0
    """Where the row's further tokens begin."""
    row_starts: list[int] = field(default_factory=list)
    """Of :class:`~megatron_fspo.types.Completion`."""
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
        """The tokens that the next one follows."""
        return (*self.context, *self.token_ids[self.row_start :])

    @property
    def turn_limit(self) -> int:
        """Tokens that the turn may have; 0 or less: there is no room for one."""
        params, before = self.params, len(self.context) + self.turn_start - self.row_start
        room = params.max_tokens if params.context_tokens is None else params.context_tokens - before
        return min(params.max_tokens - self.turn_start, room, params.turn_tokens or params.max_tokens)

    @property
    def turns(self) -> list[Sequence[int]]:
        """Token ids of the turns that have ended."""
        return [self.token_ids[turn.start : turn.stop] for turn in self._written]

    def end_turn(self, reason: Literal["stop", "length"]) -> bool:
        """End the turn under way; returns True where an environment is to be asked, for :meth:`take`."""
        self._written.append(range(self.turn_start, len(self.token_ids)))
        if reason == "stop" and self.params.environment is not None:
            return True
        self.finish_reason = reason
        return False

    def add(self, turn: Completion) -> bool:
        """Add a turn, sampled as a completion of all before it; returns what :meth:`end_turn` does."""
        start = len(self.token_ids)
        self.token_ids += turn.token_ids
        self.log_probs += turn.log_probs
        whole = VersionSpan(version=turn.weight_version, start=0, end=len(turn.token_ids))
        for span in turn.version_spans or (whole,):
            self._spans.append(replace(span, start=span.start + start, end=span.end + start))
        self._last = {"routes": turn.routes, "route_problem": turn.route_problem}
        return self.end_turn(turn.finish_reason)

    def take(self, reply: Reply) -> None:
        """Insert what the environment replied, and begin the next turn; or end."""
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
        if self.turn_limit < 1 or len(self._written) == self.params.turns:  # nobody would read it
            self.finish_reason = "length"
            del self.token_ids[start:], self.log_probs[start:]
        elif reply.restarts:
            self.row_starts.append(start)

    def completion(self, version: int | None = None) -> Completion:
        """What was written, once there is a finish reason; all of it by weights of ``version``, if given."""
        assert self.finish_reason is not None
        spans: list[VersionSpan] = []
        for span in self._spans:
            last = spans[-1:]  # which goes on, or ends after what was inserted
            if last and last[0].version == span.version:
                spans[-1] = replace(last[0], end=span.end)
                continue
            spans[-1:] = [*(replace(one, end=span.start) for one in last), span]
        return Completion(
            token_ids=self.token_ids,
            log_probs=self.log_probs,
            written=tuple(self._written),
            row_starts=tuple(self.row_starts),
            finish_reason=self.finish_reason,
            weight_version=min(span.version for span in spans) if version is None else version,
            version_spans=tuple(spans),
            failures=self._failures,
            environment_seconds=self._seconds,
            **self._last,
        )
