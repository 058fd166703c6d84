"""Samples from the training model itself, without a second copy of the weights or a server.

For small models, tests and the demo. All ranks of a replica compute the same logits, and the first of them
samples the tokens for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field
from itertools import groupby
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from megatron_fspo.rollout.engine import Arrived, Pending, Progress
from megatron_fspo.rollout.sampling import completes_stop, sample, uniforms
from megatron_fspo.rollout.trajectory import Trajectory, silent
from megatron_fspo.types import Completion, Environment, Prompt, Reply, SamplingParams


class CachedModel(Protocol):
    """A model that decodes sequences in slots of a KV cache, such as ``mcore.passes.decode.Decoder``."""

    leads: bool
    """True on the rank whose values ``settle`` returns on all ranks of the model replica."""

    def session(self, *, slots: int, max_tokens: int) -> AbstractContextManager[None]: ...

    def feed(self, tokens: Sequence[Sequence[int]]) -> Tensor: ...

    def keep(self, slots: Sequence[int]) -> None: ...

    def settle(self, values: Tensor) -> Tensor: ...

    def finish(self) -> None: ...


@dataclass(eq=False)
class _Sequence(Trajectory):
    number: int
    """See :data:`~megatron_fspo.rollout.engine.Arrived`."""
    draws: Sequence[float]
    """Its random stream, one number per sampled token."""
    drawn: int = 0

    def known(self, position: int) -> int | None:
        """Return the token at a position of the current row; None: it is the next to be sampled."""
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
    """Slots of the KV cache. More completions are decoded in several batches."""
    _version: int = field(default=0, init=False)

    def update_weights(self, version: int) -> None:
        """Set the version. The weights are the trainer's own, so nothing is copied."""
        self._version = version

    def rest(self) -> None:
        """Do nothing, as no memory is held between batches."""

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Do nothing."""

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        mine: range | None = None,
        arrived: Arrived | None = None,
    ) -> Pending:
        """See the protocol."""

        def collect(progress: Progress | None = None, *, stops: bool = False) -> list[list[Completion]]:
            sequences = [
                _Sequence(
                    prompts[position],
                    params,
                    number=position * params.n + number,
                    draws=uniforms(params.seed, prompts[position].index, number, params.max_tokens).tolist(),
                )
                for position in (range(len(prompts)) if mine is None else mine)
                for number in range(params.n)
            ]

            def finished(done: list[_Sequence]) -> None:
                if progress is not None and done:
                    progress(len(done))
                if arrived is not None:
                    for sequence in done:
                        arrived(sequence.number, sequence.completion(self._version))

            left = sequences
            while left:
                # Batch contexts of similar length: only their common length is read in one pass.
                left = sorted(left, key=lambda sequence: len(sequence.context))
                again = self._decode(left[: self.max_batch], params, finished)
                left = left[self.max_batch :] + again
            self.model.finish()
            completions = [sequence.completion(self._version) for sequence in sequences]
            return [completions[i : i + params.n] for i in range(0, len(sequences), params.n)]

        return collect

    def _decode(
        self, batch: list[_Sequence], params: SamplingParams, finished: Callable[[list[_Sequence]], None]
    ) -> list[_Sequence]:
        """Decode until each completion has ended or its context was restarted. Return the latter."""
        # A lane is a slot of the KV cache. Completions with equal contexts share one until their first token.
        lanes = [list(sequences) for _, sequences in groupby(batch, key=lambda sequence: sequence.context)]
        rows_before = {sequence: len(sequence.row_starts) for sequence in batch}
        again: list[_Sequence] = []
        position = min(len(sequence.context) for sequence in batch)
        longest = max(len(sequence.context) + params.max_tokens - sequence.row_start for sequence in batch)
        with self.model.session(slots=len(lanes), max_tokens=longest):
            logits = self.model.feed([lane[0].context[:position] for lane in lanes])
            while True:
                shared = lanes
                # Each completion that writes at this position gets its own lane, copied from the shared one.
                pairs = [
                    (sequences, origin)
                    for origin, lane in enumerate(shared)
                    for sequences in ([lane] if position < len(lane[0].context) else [[s] for s in lane])
                ]
                lanes, origins = [sequences for sequences, _ in pairs], [origin for _, origin in pairs]
                next_tokens = self._extend(lanes, logits[origins], position, params)
                ended = [sequence for sequence, *_ in lanes if sequence.finish_reason is not None]
                finished(ended)
                again += [s for s, *_ in lanes if len(s.row_starts) > rows_before[s]]
                gone = {*ended, *again}
                live = [i for i, lane in enumerate(lanes) if lane[0] not in gone]
                # The last lanes replace those that ended, so that few slots of the cache are copied.
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
        self, lanes: list[list[_Sequence]], logits: Tensor, position: int, params: SamplingParams
    ) -> list[int]:
        """Return the token of each lane at ``position``: the context's if it reaches there, else a sample."""
        first = [lane[0] for lane in lanes]
        drawn = [sequence.draws[min(sequence.drawn, params.max_tokens - 1)] for sequence in first]
        draws = torch.tensor(drawn, dtype=torch.float64)
        sampled, log_probs = sample(logits, draws, temperature=params.temperature, top_p=params.top_p)
        # One rank samples for all: with another token, a rank might stop while the others go on.
        sampled, log_probs = self.model.settle(torch.stack([sampled.double(), log_probs.double()]))
        tokens = [int(token) for token in sampled.tolist()]
        asking = []
        for i, (sequence, log_prob) in enumerate(zip(first, log_probs.tolist(), strict=True)):
            if (known := sequence.known(position)) is not None:
                tokens[i] = known
                continue
            sequence.token_ids.append(tokens[i])
            sequence.log_probs.append(log_prob)
            sequence.drawn += 1
            turn = sequence.token_ids[sequence.turn_start :] if params.stop else sequence.token_ids
            # All ranks of the model replica have the same tokens, so they decide alike.
            if tokens[i] in params.stop_token_ids or completes_stop(turn, params):
                if sequence.end_turn("stop"):
                    asking.append(sequence)
            elif len(sequence.token_ids) == sequence.turn_start + sequence.turn_limit:
                sequence.end_turn("length")
        if asking:
            assert params.environment is not None
            replies = self._replies(asking, params.environment, logits.device)
            for sequence, reply in zip(asking, replies, strict=True):
                sequence.take(reply)
        return tokens

    def _replies(self, asked: list[_Sequence], environment: Environment, device: torch.device) -> list[Reply]:
        """Ask for all replies at once, on one rank of the model replica, and wait for them. Collective."""
        replies: list[Reply] = []
        if self.model.leads:
            futures = {environment.answer(s.prompt, s.turns, s): s.prompt.index for s in asked}
            left = set(futures)
            while left:
                done, left = wait(left, environment.limit_seconds, FIRST_COMPLETED)
                if not done:
                    raise silent(environment, futures[left.pop()])
            replies = [future.result() for future in futures]
        encoded = msgspec.msgpack.encode(replies)
        size = int(self.model.settle(torch.tensor([len(encoded)], device=device)).item())
        data = torch.zeros(size, dtype=torch.uint8, device=device)
        if self.model.leads:
            data = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(device)
        return msgspec.msgpack.decode(self.model.settle(data).cpu().numpy().tobytes(), type=list[Reply])
