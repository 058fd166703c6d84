"""Samples from the training model itself: no second copy of the weights, no server.

For small models, tests and the demo. Every rank of a model copy asks for the same and sees the same logits;
the tokens are those that the first of them draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field
from itertools import groupby, islice
from typing import Protocol

import torch
from torch import Tensor

from megatron_fspo.rollout.engine import Arrived, Pending, Progress
from megatron_fspo.rollout.sampling import completes_stop, sample, uniforms
from megatron_fspo.rollout.trajectory import Trajectory
from megatron_fspo.types import Completion, Environment, Prompt, Reply, SamplingParams


class CachedModel(Protocol):
    """A model that decodes rows side by side; ``mcore.decode.Decoder`` is one."""

    leads: bool
    """This rank's values are those that ``settle`` gives to all ranks of the model copy."""

    def session(self, *, rows: int, max_tokens: int) -> AbstractContextManager[None]: ...

    def feed(self, tokens: Sequence[Sequence[int]]) -> Tensor: ...

    def keep(self, rows: Sequence[int]) -> None: ...

    def settle(self, values: Tensor) -> Tensor: ...

    def finish(self) -> None: ...


@dataclass(eq=False)
class _Row(Trajectory):
    """One completion being written."""

    number: int
    """See :data:`~megatron_fspo.rollout.engine.Arrived`."""
    draws: Sequence[float]
    """Its random stream, one number a token that is drawn."""
    drawn: int = 0

    def known(self, position: int) -> int | None:
        """Return the token at a position of the row under way; None: it is the next to be drawn."""
        if position < len(self.context):
            return self.context[position]
        own = position - len(self.context) + self.row_start
        return self.token_ids[own] if own < len(self.token_ids) else None


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
                    prompts[position],
                    params,
                    number=position * params.n + number,
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
                        arrived(row.number, row.completion(self._version))

            left = rows
            while left:
                # Contexts of like length share a batch: a row waits for no one while its own is read.
                left = sorted(left, key=lambda row: len(row.context))
                again = self._decode(left[: self.max_batch], params, finished)
                left = left[self.max_batch :] + again
            self.model.finish()
            completions = [row.completion(self._version) for row in rows]
            return [completions[i : i + params.n] for i in range(0, len(rows), params.n)]

        return collect

    def _decode(
        self, batch: list[_Row], params: SamplingParams, finished: Callable[[list[_Row]], None]
    ) -> list[_Row]:
        """Decode until each has ended, or begins a row anew; returns those."""
        # A lane is a row of the cache. Rows of one context share a lane until they write their first token.
        lanes = [list(rows) for _, rows in groupby(batch, key=lambda row: row.context)]
        rows_before = {row: len(row.row_starts) for row in batch}
        again: list[_Row] = []
        position = min(len(row.context) for row in batch)
        longest = max(len(row.context) + params.max_tokens - row.row_start for row in batch)
        with self.model.session(rows=len(lanes), max_tokens=longest):
            logits = self.model.feed([lane[0].context[:position] for lane in lanes])
            while True:
                shared = lanes
                # Each row that writes at this position gets a lane of its own, from the one that it shared.
                pairs = [
                    (rows, origin)
                    for origin, lane in enumerate(shared)
                    for rows in ([lane] if position < len(lane[0].context) else [[r] for r in lane])
                ]
                lanes, origins = [rows for rows, _ in pairs], [origin for _, origin in pairs]
                next_tokens = self._extend(lanes, logits[origins], position, params)
                ended = [row for row, *_ in lanes if row.finish_reason is not None]
                finished(ended)
                again += [row for row, *_ in lanes if len(row.row_starts) > rows_before[row]]
                gone = {*ended, *again}
                live = [i for i, lane in enumerate(lanes) if lane[0] not in gone]
                # The last lanes take the places of those that ended: few rows of the cache are copied.
                late = [i for i in live if i >= len(live)]
                live = [late.pop() if lanes[i][0] in gone else i for i in range(len(live))]
                if not live:
                    return again
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
        drawn = [row.draws[min(row.drawn, params.max_tokens - 1)] for row in first]
        draws = torch.tensor(drawn, dtype=torch.float64)
        sampled, log_probs = sample(logits, draws, temperature=params.temperature, top_p=params.top_p)
        # Another token on one rank of a model, and it would stop while the others go on: one of them draws.
        sampled, log_probs = self.model.settle(torch.stack([sampled.double(), log_probs.double()]))
        tokens = [int(token) for token in sampled.tolist()]
        asking = []
        for i, (row, log_prob) in enumerate(zip(first, log_probs.tolist(), strict=True)):
            if (known := row.known(position)) is not None:
                tokens[i] = known
                continue
            row.token_ids.append(tokens[i])
            row.log_probs.append(log_prob)
            row.drawn += 1
            turn = row.token_ids[row.turn_start :] if params.stop else row.token_ids
            # Every rank of the model has the same tokens, and so the same text.
            if tokens[i] in params.stop_token_ids or completes_stop(turn, params):
                if row.end_turn("stop"):
                    asking.append(row)
            elif len(row.token_ids) == row.turn_start + row.turn_limit:
                row.end_turn("length")
        if asking:
            assert params.environment is not None
            replies = self._replies(asking, params.environment, logits.device)
            for row, reply in zip(asking, replies, strict=True):
                row.take(reply)
        return tokens

    def _replies(self, rows: list[_Row], environment: Environment, device: torch.device) -> list[Reply]:
        """Ask for all of them at the same time, on one rank of the model copy, and wait. Collective."""
        replies: list[Reply] = []
        if self.model.leads:
            asked = [environment.answer(row.prompt, row.turns, row) for row in rows]
            replies = [one.result() for one in asked]
        sizes = torch.zeros(len(rows), 5, dtype=torch.float64, device=device)
        for i, reply in enumerate(replies):
            length = -1 if reply.token_ids is None else len(reply.token_ids)
            reward = math.nan if reply.reward is None else reply.reward
            sizes[i] = torch.tensor([length, reward, reply.failed, reply.restarts, reply.seconds])
        known = self.model.settle(sizes).tolist()
        flat = torch.zeros(int(sum(max(length, 0) for length, *_ in known)), device=device).long()
        if replies:
            inserted = [token for reply in replies for token in reply.token_ids or ()]
            flat = torch.tensor(inserted, device=device, dtype=torch.long)
        tokens = iter(self.model.settle(flat).tolist())
        return [
            Reply(
                token_ids=None if length < 0 else tuple(islice(tokens, int(length))),
                reward=None if math.isnan(reward) else reward,
                failed=bool(failed),
                restarts=bool(restarts),
                seconds=seconds,
            )
            for length, reward, failed, restarts, seconds in known
        ]
