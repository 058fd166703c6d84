"""Samples from the training model itself: no second copy of the weights, no server.

For small models, tests and the demo. Every rank of a model copy asks for the same and sees the same logits;
the tokens are those that the first of them draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field
from itertools import groupby
from typing import Literal, Protocol

import torch
from torch import Tensor

from megatron_fspo.rollout.engine import Arrived, Pending, Progress
from megatron_fspo.rollout.sampling import completes_stop, sample, uniforms
from megatron_fspo.types import Completion, Prompt, SamplingParams


class CachedModel(Protocol):
    """A model that decodes rows side by side; ``mcore.decode.Decoder`` is one."""

    def session(self, *, rows: int, max_tokens: int) -> AbstractContextManager[None]: ...

    def feed(self, tokens: Sequence[Sequence[int]]) -> Tensor: ...

    def keep(self, rows: Sequence[int]) -> None: ...

    def settle(self, values: Tensor) -> Tensor: ...

    def finish(self) -> None: ...


@dataclass
class _Row:
    """One completion being written."""

    number: int
    """See :data:`~megatron_fspo.rollout.engine.Arrived`."""
    prompt: Prompt
    draws: Sequence[float]
    """Its random stream, one number a token."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None


@dataclass(eq=False)
class EmbeddedEngine:
    """A :class:`~megatron_fspo.rollout.engine.RolloutEngine` on the trainer's own weights."""

    model: CachedModel
    _: KW_ONLY
    max_batch: int
    """Rows of a KV cache; more completions are decoded one batch after the other."""
    _version: int = field(default=0, init=False)

    def update_weights(self, version: int) -> None:
        """The weights are the trainer's, so there is nothing to copy."""
        self._version = version

    def rest(self) -> None:
        """Sampling holds no memory after its end."""

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing is held."""

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        mine: range | None = None,
        arrived: Arrived | None = None,
    ) -> Pending:
        """See the protocol."""

        def collect(progress: Progress | None = None, *, stops: bool = False) -> list[list[Completion]]:
            rows = [
                _Row(
                    number=position * params.n + number,
                    prompt=prompts[position],
                    draws=uniforms(params.seed, prompts[position].index, number, params.max_tokens).tolist(),
                )
                for position in (range(len(prompts)) if mine is None else mine)
                for number in range(params.n)
            ]

            def finished(done: list[_Row]) -> None:
                if progress is not None and done:
                    progress(len(done))
                if arrived is not None:
                    for row in done:
                        arrived(row.number, self._completion(row))

            # Prompts of like length share a batch: a row waits for no one while its prompt is read.
            by_length = sorted(rows, key=lambda row: len(row.prompt.token_ids))
            for start in range(0, len(rows), self.max_batch):
                self._decode(by_length[start : start + self.max_batch], params, finished)
            self.model.finish()
            completions = [self._completion(row) for row in rows]
            return [completions[i : i + params.n] for i in range(0, len(rows), params.n)]

        return collect

    def _decode(
        self, batch: list[_Row], params: SamplingParams, finished: Callable[[list[_Row]], None]
    ) -> None:
        # A lane is a row of the cache. Rows of one prompt share a lane until they write their first token.
        lanes = [list(rows) for _, rows in groupby(batch, key=lambda row: row.prompt.token_ids)]
        lengths = [len(lane[0].prompt.token_ids) for lane in lanes]
        position = min(lengths)
        with self.model.session(rows=len(lanes), max_tokens=max(lengths) + params.max_tokens):
            logits = self.model.feed([lane[0].prompt.token_ids[:position] for lane in lanes])
            while True:
                shared = lanes
                # Each row that writes at this position gets a lane of its own, from the one that it shared.
                pairs = [
                    (rows, origin)
                    for origin, lane in enumerate(shared)
                    for rows in ([lane] if position < len(lane[0].prompt.token_ids) else [[r] for r in lane])
                ]
                lanes, origins = [rows for rows, _ in pairs], [origin for _, origin in pairs]
                next_tokens = self._extend(lanes, logits[origins], position, params)
                live = [i for i, lane in enumerate(lanes) if lane[0].finish_reason is None]
                # The last lanes take the places of those that ended: few rows of the cache are copied.
                late = [i for i in live if i >= len(live)]
                live = [i if lanes[i][0].finish_reason is None else late.pop() for i in range(len(live))]
                finished([lane[0] for lane in lanes if lane[0].finish_reason is not None])
                if not live:
                    return
                kept = [origins[i] for i in live]
                if kept != list(range(len(shared))):
                    self.model.keep(kept)
                lanes = [lanes[i] for i in live]
                logits = self.model.feed([[next_tokens[i]] for i in live])
                position += 1

    def _extend(
        self, lanes: list[list[_Row]], logits: Tensor, position: int, params: SamplingParams
    ) -> list[int]:
        """The token of every lane at ``position``: the prompt's, where it goes on, else a sampled one."""
        first = [lane[0] for lane in lanes]
        drawn = [row.draws[min(len(row.token_ids), params.max_tokens - 1)] for row in first]
        draws = torch.tensor(drawn, dtype=torch.float64)
        sampled, log_probs = sample(logits, draws, temperature=params.temperature, top_p=params.top_p)
        # Another token on one rank of a model, and it would stop while the others go on: one of them draws.
        sampled, log_probs = self.model.settle(torch.stack([sampled.double(), log_probs.double()]))
        tokens = [int(token) for token in sampled.tolist()]
        for i, (row, log_prob) in enumerate(zip(first, log_probs.tolist(), strict=True)):
            if position < len(row.prompt.token_ids):
                tokens[i] = row.prompt.token_ids[position]
                continue
            row.token_ids.append(tokens[i])
            row.log_probs.append(log_prob)
            # Every rank of the model has the same tokens, and so the same text.
            if tokens[i] in params.stop_token_ids or completes_stop(row.token_ids, params):
                row.finish_reason = "stop"
            elif len(row.token_ids) == params.max_tokens:
                row.finish_reason = "length"
        return tokens

    def _completion(self, row: _Row) -> Completion:
        assert row.finish_reason is not None
        return Completion(
            token_ids=row.token_ids,
            log_probs=row.log_probs,
            finish_reason=row.finish_reason,
            weight_version=self._version,
        )
