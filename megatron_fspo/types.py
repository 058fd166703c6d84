"""Frozen records shared by all rooms of the package."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, Protocol

Decode = Callable[[Sequence[int]], str]
"""Token ids → text, special tokens included."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One task for the policy.

    Example::

        Prompt(index=3, token_ids=(10, 5, 7, 11), text="^57=", answer="57")
    """

    index: int
    """Position among the prompts of all training sets, or of all evaluation sets, from 0. Logs and random
    streams identify the prompt by it."""
    token_ids: tuple[int, ...]
    """The prompt's tokens; never empty."""
    text: str
    """The tokens as text, after the chat template if there is one."""
    answer: str
    """Reference answer, for the reward."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """All fields of the row in the data file, as JSON types; for rewards."""
    dataset: str = ""
    """Name of the data set."""
    demonstration: Completion | None = None
    """The response that the data set gives, for supervised training."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Sizes of the routes of a mixture of experts: which experts each layer sends a token to."""

    layers: int
    experts: int
    """Experts of a layer."""
    per_token: int
    """k: experts of a layer that process a token."""
    dense: int = 0
    """First layers, with an MLP; servers send zeros for them."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An environment's reply to a turn."""

    token_ids: tuple[int, ...] | None = None
    """Tokens to insert before the next turn; None: the trajectory ends."""
    restarts: bool = False
    """The inserted tokens begin a new row: they replace the context, prompt included."""
    reward: float | None = None
    """Reward of the trajectory, at its end; None: the environment gives none."""
    failed: bool = False
    """A tool raised an exception, timed out or was killed."""
    seconds: float = field(default=0.0, compare=False)
    """Time the reply took."""


class Environment(Protocol):
    """Replies to the turns of the policy."""

    limit_seconds: float
    """If none of the replies that it owes arrives for so long, the run ends."""

    def answer(self, prompt: Prompt, turns: Sequence[Sequence[int]], trajectory: object) -> Future[Reply]:
        """Return a future of the reply to the last of ``turns`` (token ids). Thread-safe; errors become a
        reply with ``failed`` set. ``trajectory`` is the same object for all turns of a trajectory, so an
        environment can bind state to its lifetime."""
        ...


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters. Fields that vLLM has too mean the same as there."""

    n: int = 1
    """Completions per prompt."""
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    max_tokens: int
    """Longest completion, in tokens, with stop tokens and inserted tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """A turn ends with the first of these tokens, which is part of it."""
    stop: tuple[str, ...] = ()
    """A turn also ends with the token that completes one of these in its text; the token is part of it
    (:mod:`megatron_fspo.rollout.sampling`)."""
    environment: Environment | None = None
    """Replies to a turn that stopped; None: the completion has one turn."""
    turns: int = 1
    """Maximum number of turns, with an environment."""
    turn_tokens: int | None = None
    """Longest turn; None: the rest of ``max_tokens``. A turn that reaches the limit is the last."""
    context_tokens: int | None = None
    """Longest row in tokens, prompt included; None: no limit."""
    decode: Decode | None = None
    """Decodes the text that is searched for ``stop``; required with it."""
    seed: int = 0
    """(seed, prompt index, sample number) identify the random stream of a completion."""
    routing: Routing | None = None
    """Return routes of these sizes with the completions; None: no routes."""

    def __post_init__(self) -> None:
        if self.stop and self.decode is None:
            raise ValueError("SamplingParams.stop needs decode")


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """Tokens ``start`` to ``end`` (exclusive) of a response. One weight version sampled those among them that
    the policy wrote."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled response: one turn, or several turns with tokens that an environment inserted between them.

    Example::

        Completion(token_ids=(9, 4, 8, 12), log_probs=(-0.9, -0.1, -0.2, -0.3),
                   finish_reason="stop", weight_version=7)
    """

    token_ids: Sequence[int]
    """All tokens after the prompt, as an ``array("i")``. If ``finish_reason`` is ``"stop"``, the last one
    that the policy wrote is a stop token or completes a stop string."""
    log_probs: Sequence[float]
    """Log-prob of each token in nats under the sampling distribution (after temperature and top-p); 0 for
    inserted tokens. Stored as an ``array("f")``."""
    reference: Sequence[float] = ()
    """Log-prob of each token under a teacher, in nats, as an ``array("f")``; empty: not scored."""
    loss_mask: Sequence[int] = ()
    """1 for each token that the policy wrote, 0 for those that an environment inserted. Empty: the policy
    wrote all. Stored as an ``array("b")``."""
    turn_starts: tuple[int, ...] = ()
    """First tokens of turns that the mask does not show: the environment's reply before them was empty."""
    row_starts: tuple[int, ...] = ()
    """First tokens of the second and later rows, in order; all are inserted tokens. The context of a token
    is its row only. The first row begins with the prompt."""
    finish_reason: Literal["stop", "length"]
    weight_version: int
    """Version of the weights that sampled it; the oldest one if they changed meanwhile."""
    version_spans: tuple[VersionSpan, ...] = ()
    """Weight version of every token, in order; empty if ``weight_version`` sampled all."""
    reward: float | None = None
    """Reward from the environment, if it gave one."""
    failures: int = 0
    """Number of environment replies that failed."""
    environment_seconds: float = field(default=0.0, compare=False)
    """Total time of the environment's replies."""
    routes: Any = None
    """Experts of each token, [P + R - 1, layers, k] for P prompt tokens and R tokens after them. The
    last token has no entry, as the sampler did not read it. None: not reported."""
    route_problem: str = ""
    """Why there are no routes, although they were requested."""

    def __post_init__(self) -> None:
        # 9 bytes per token; tuples of Python numbers need ten times as much.
        size = len(self.token_ids)
        mask = self.loss_mask or array("b", [1]) * size
        for name, typecode, values in (
            ("token_ids", "i", self.token_ids),
            ("log_probs", "f", self.log_probs),
            ("loss_mask", "b", mask),
        ):
            if not (isinstance(values, array) and values.typecode == typecode):
                values = array(typecode, values)
            object.__setattr__(self, name, values)
        if len(mask) != size or bytes(self.loss_mask).strip(b"\0\1"):
            raise ValueError(f"loss_mask = {[*mask]}: not 0 or 1 for each of {size} tokens")
        if any(not 0 <= start < size or mask[start] for start in self.row_starts):
            raise ValueError(f"row_starts = {self.row_starts}: not inserted, of {size} tokens")

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """Weight version of every token, in order; never empty."""
        whole = VersionSpan(version=self.weight_version, start=0, end=len(self.token_ids))
        return self.version_spans or (whole,)

    @property
    def length(self) -> int:
        """L, the number of tokens that the policy wrote."""
        return sum(self.loss_mask)

    @property
    def turns(self) -> tuple[range, ...]:
        """Ranges of the tokens of each turn, in order; at least one, which may be empty."""
        runs = [run.span() for run in re.finditer(b"\1+", bytes(self.loss_mask))]
        edges = sorted({*self.turn_starts, *(edge for run in runs for edge in run)})
        turns = (range(*ends) for ends in pairwise(edges) if self.loss_mask[ends[0]])
        return tuple(turns) or (range(0),)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A completion with its reward and advantage. For code that handles few samples; a run stores columns."""

    prompt: Prompt
    number: int
    """Number of the completion among the prompt's, from 0."""
    completion: Completion
    reward: float
    advantage: float
