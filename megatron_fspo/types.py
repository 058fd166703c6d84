"""The frozen records that cross rooms."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Decode = Callable[[Sequence[int]], str]
"""Token ids → their text, special tokens included."""

INSERTED, WRITTEN, ROW_START = range(3)
"""What a token after the prompt is: :attr:`Completion.kinds`."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One task for the policy.

    Example::

        Prompt(index=3, token_ids=(10, 5, 7, 11), text="^57=", answer="57")
    """

    index: int
    """Number of the prompt among those of all training sets, or of all evaluation sets, from 0: its name in
    logs and in random streams."""
    token_ids: tuple[int, ...]
    """The tokens that the model reads; never empty."""
    text: str
    """The tokens as text (after the chat template, if one is used)."""
    answer: str
    """The reference that the reward compares the response with."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """All fields of its row in the data file, as JSON types; for rewards."""
    dataset: str = ""
    """Name of the data set that it belongs to."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The size of a token's routes in a mixture of experts."""

    layers: int
    experts: int
    """Of a layer."""
    per_token: int
    """k experts of a layer for each token."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What an environment answers to a turn."""

    token_ids: tuple[int, ...] | None = None
    """What is inserted before the next turn; None: the trajectory ends here."""
    restarts: bool = False
    """The next turn reads these tokens and nothing before them, not even the prompt: they begin a row."""
    reward: float | None = None
    """Of the trajectory, at its end; None: the environment has none."""
    failed: bool = False
    """A tool raised, hung or was killed."""
    seconds: float = field(default=0.0, compare=False)
    """That it took."""


class Environment(Protocol):
    """Answers the turns of a policy."""

    def answer(self, prompt: Prompt, turns: Sequence[Sequence[int]], trajectory: object) -> Future[Reply]:
        """Return the reply to come to the last of the policy's turns, which are token ids. Any thread may
        ask; whatever goes wrong is a reply that failed. ``trajectory`` is the same object at each of its
        turns, and lives as long: what is kept for it goes with it."""
        ...


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample. The same meaning as the fields of that name in vLLM."""

    n: int = 1
    """Completions per prompt."""
    temperature: float = 1.0
    """0 samples greedily."""
    top_p: float = 1.0
    max_tokens: int
    """Longest completion, in tokens: stop tokens, and what an environment inserts, included."""
    stop_token_ids: tuple[int, ...] = ()
    """A turn ends with the first of these, which it includes."""
    stop: tuple[str, ...] = ()
    """It also ends with the token that completes the first of these in its text, which it includes
    (:mod:`megatron_fspo.rollout.sampling`)."""
    environment: Environment | None = None
    """Answers a turn that ended so; None: the completion has one turn."""
    turns: int = 1
    """With an environment: as many at most."""
    turn_tokens: int | None = None
    """Longest turn; None: what is left of the completion. One that is cut is the last."""
    context_tokens: int | None = None
    """Longest row, prompt included: what the model reads and writes at most; None: any."""
    decode: Decode | None = None
    """The text in which ``stop`` is looked for; needed with it."""
    seed: int = 0
    """With (prompt index, sample number) it names the random stream of one completion."""
    routing: Routing | None = None
    """Completions come with their routes."""

    def __post_init__(self) -> None:
        if self.stop and self.decode is None:
            raise ValueError("stop needs decode")


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """The tokens of a response from ``start`` up to, without, ``end``: what the policy wrote of them, one
    version of the weights sampled."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled response: of one turn, or of several, with what an environment inserted between them.

    Example::

        Completion(token_ids=(9, 4, 8, 12), log_probs=(-0.9, -0.1, -0.2, -0.3),
                   finish_reason="stop", weight_version=7)
    """

    token_ids: Sequence[int]
    """All that comes after the prompt. When ``finish_reason`` is ``"stop"``, the last one that the policy
    wrote is a stop token, or completes a stop string. Kept as an ``array("i")``."""
    log_probs: Sequence[float]
    """Log-prob of each token under the distribution sampled from (after temperature and top-p), nats; 0 of
    what an environment inserted. Kept as an ``array("f")``."""
    written: tuple[range, ...] = ()
    """Where the tokens stand that the policy wrote, in order; an environment inserted the others. None given:
    it wrote all."""
    row_starts: tuple[int, ...] = ()
    """Where further rows begin, in order, each with an inserted token. What follows was written after the
    tokens of its row alone; the first row begins with the prompt."""
    finish_reason: Literal["stop", "length"]
    weight_version: int
    """Version of the weights that sampled it; the oldest, if they changed under way."""
    version_spans: tuple[VersionSpan, ...] = ()
    """Which version sampled which tokens, in order, all of them; empty where all are ``weight_version``'s."""
    reward: float | None = None
    """The environment's; None: it gave none, or there is no environment."""
    failures: int = 0
    """Replies of the environment that failed."""
    environment_seconds: float = field(default=0.0, compare=False)
    """That its replies took."""
    routes: Any = None
    """Tensor of uint8 [P + R - 1, layers, k]: the experts that each of the P tokens of the prompt and the R
    after it was sent to, but for the last one, which the sampler did not read; None where it did not tell."""
    route_problem: str = ""
    """Why there are none, though they were asked for."""

    def __post_init__(self) -> None:
        # 8 bytes per token; tuples of Python's numbers take ten times that.
        for name, typecode in (("token_ids", "i"), ("log_probs", "f")):
            values = getattr(self, name)
            if not (isinstance(values, array) and values.typecode == typecode):
                object.__setattr__(self, name, array(typecode, values))
        written = self.written or (range(len(self.token_ids)),)
        object.__setattr__(self, "written", written)
        edges = [edge for one in written for edge in (one.start, one.stop)]
        if edges != sorted(edges) or edges[0] < 0 or edges[-1] > len(self.token_ids):
            raise ValueError(f"written = {written} of {len(self.token_ids)} tokens")
        own = any(start in one for start in self.row_starts for one in written)
        if own or not set(self.row_starts) <= set(range(len(self.token_ids))):
            raise ValueError(f"row_starts = {self.row_starts} of {len(self.token_ids)} tokens, {written=}")

    @property
    def length(self) -> int:
        """Tokens that the policy wrote: L."""
        return sum(map(len, self.written))

    @property
    def kinds(self) -> array[int]:
        """What each token is, as an ``array("b")``: :data:`WRITTEN` by the policy, :data:`INSERTED`, or
        inserted and a :data:`ROW_START`."""
        kinds = array("b", bytes(len(self.token_ids)))
        for start in self.row_starts:
            kinds[start] = ROW_START
        for one in self.written:
            kinds[one.start : one.stop] = array("b", bytes([WRITTEN]) * len(one))
        return kinds


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A completion with its reward and advantage, by itself: for what works on a few. A run keeps columns."""

    prompt: Prompt
    number: int
    """Which of the prompt's completions, from 0."""
    completion: Completion
    reward: float
    advantage: float
