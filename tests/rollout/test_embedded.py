"""The embedded engine on a Markov chain, where what should come out can be worked out row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

import pytest
import torch
from torch import Tensor

from megatron_fspo.rollout.embedded import EmbeddedEngine
from megatron_fspo.rollout.sampling import sample, uniforms
from megatron_fspo.types import Completion, Prompt, SamplingParams

VOCAB = 6
STOP = 5


class Markov:
    """A :class:`CachedModel` whose logits are a table of (token before, last token, position).

    It holds what it was fed, as a KV cache would, and objects to whatever would go wrong in a real one.
    """

    leads = True

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.table = torch.randn(VOCAB, VOCAB, 64, VOCAB, generator=generator) * 1.5
        self.rows: list[list[int]] | None = None
        self.sessions: list[tuple[int, int]] = []
        self.widths: list[int] = []
        """Slots of every feed."""

    @contextmanager
    def session(self, *, slots: int, max_tokens: int) -> Iterator[None]:
        assert self.rows is None, "a session within a session"
        self.rows, self._max_tokens = [[] for _ in range(slots)], max_tokens
        self.sessions.append((slots, max_tokens))
        try:
            yield
        finally:
            self.rows = None

    def feed(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        assert self.rows is not None and len(tokens) == len(self.rows)
        assert len({len(row) for row in tokens}) == 1 and len(tokens[0]) > 0
        for row, more in zip(self.rows, tokens, strict=True):
            row += more
        assert len(self.rows[0]) < self._max_tokens
        self.widths.append(len(tokens))
        return torch.stack([self.logits(row) for row in self.rows])

    def keep(self, slots: Sequence[int]) -> None:
        assert self.rows is not None and slots and list(slots) != list(range(len(self.rows)))
        # Without new ones, no lane but the last goes elsewhere.
        if len(slots) < len(self.rows) and len(set(slots)) == len(slots):
            assert all(slot == place or slot >= len(slots) for place, slot in enumerate(slots))
        self.rows = [list(self.rows[i]) for i in slots]

    def settle(self, values: Tensor) -> Tensor:
        assert self.rows is not None
        return values

    def finish(self) -> None:
        assert self.rows is None

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Of the token after ``ids``."""
        before = ids[-2] if len(ids) > 1 else 0
        return self.table[before, ids[-1], len(ids)]


def prompt(index: int, *token_ids: int) -> Prompt:
    return Prompt(index=index, token_ids=token_ids, text="", answer="")


PROMPTS = [prompt(4, 1, 2, 3), prompt(7, 2), prompt(5, 0, 0, 1, 1, 0, 4, 2), prompt(9, 3), prompt(2, 4, 4)]
PARAMS = SamplingParams(n=3, max_tokens=12, stop_token_ids=(STOP,), seed=11, temperature=0.8, top_p=0.9)


def alone(prompt: Prompt, number: int, params: SamplingParams, version: int = 0) -> Completion:
    """One completion, written one token after the other with nothing beside it."""
    model, ids = Markov(), list(prompt.token_ids)
    log_probs: list[float] = []
    for draw in uniforms(params.seed, prompt.index, number, params.max_tokens):
        logits = model.logits(ids)[None]
        token, log_prob = sample(logits, draw[None], temperature=params.temperature, top_p=params.top_p)
        ids.append(int(token))
        log_probs.append(log_prob.item())
        if ids[-1] in params.stop_token_ids:
            break
    return Completion(
        token_ids=tuple(ids[len(prompt.token_ids) :]),
        log_probs=tuple(log_probs),
        finish_reason="stop" if ids[-1] in params.stop_token_ids else "length",
        weight_version=version,
    )


@pytest.mark.parametrize("max_batch", [1, 4, 100])
def test_a_batch_is_each_completion_alone(max_batch: int) -> None:
    engine = EmbeddedEngine(Markov(), max_batch=max_batch)
    engine.update_weights(3)
    assert engine.submit([], PARAMS)() == []
    found = engine.submit(PROMPTS, PARAMS)()
    assert found == [[alone(prompt, number, PARAMS, version=3) for number in range(3)] for prompt in PROMPTS]
    flat = list(chain(*found))
    assert {completion.finish_reason for completion in flat} == {"stop", "length"}
    assert len({tuple(completion.token_ids) for completion in flat}) > 10
    for completion in flat:
        assert len(completion.token_ids) == len(completion.log_probs) <= PARAMS.max_tokens
        stops = [token == STOP for token in completion.token_ids]
        assert not any(stops[:-1])
        assert stops[-1] == (completion.finish_reason == "stop")


def test_the_model_is_fed_live_rows_only_and_each_prompt_once() -> None:
    model = Markov()
    found = EmbeddedEngine(model, max_batch=100).submit(PROMPTS, PARAMS)()
    assert model.rows is None
    assert model.sessions == [(5, 7 + 12)]
    # Feed k (from 0) brings a row to the place of its token k + 1; the shortest prompt has one token. A row
    # is fed until its last token is drawn, which is not fed.
    lengths = [len(prompt.token_ids) for prompt in PROMPTS]
    ends = [
        [length + len(completion.token_ids) - 1 for completion in row]
        for length, row in zip(lengths, found, strict=True)
    ]
    assert model.widths == [
        sum(
            1 if k < length else sum(end > k for end in row)
            for length, row in zip(lengths, ends, strict=True)
        )
        for k in range(max(end for row in ends for end in row))
    ]


def test_prompts_of_like_length_share_a_batch() -> None:
    model = Markov()
    EmbeddedEngine(model, max_batch=6).submit(PROMPTS, PARAMS)()
    assert model.sessions == [(2, 1 + 12), (2, 3 + 12), (1, 7 + 12)]


def test_stop_strings_cut_what_would_be_sampled_without_them() -> None:
    def decode(ids: Sequence[int]) -> str:
        return "".join("abcde."[token] for token in ids)

    params = replace(PARAMS, max_tokens=30, stop_token_ids=())
    whole = EmbeddedEngine(Markov(), max_batch=4).submit(PROMPTS, params)()
    asked = replace(params, stop=("ab", "ca"), decode=decode)
    found = EmbeddedEngine(Markov(), max_batch=4).submit(PROMPTS, asked)()
    ends = set()
    for long, short in zip(chain(*whole), chain(*found), strict=True):
        text = decode(long.token_ids)
        cuts = [text.index(string) + 2 for string in asked.stop if string in text]
        end = min(cuts, default=len(text))
        assert list(short.token_ids) == list(long.token_ids[:end])
        assert list(short.log_probs) == list(long.log_probs[:end])
        assert short.finish_reason == ("stop" if cuts else "length")
        ends.add(end)
    assert len(ends) > 3 and 30 in ends


def test_each_completion_is_told_when_it_is_done_by_its_number_among_all_ranks() -> None:
    arrived: list[tuple[int, Completion]] = []
    steps: list[int] = []
    engine = EmbeddedEngine(Markov(), max_batch=4)
    pending = engine.submit(PROMPTS, PARAMS, range(1, 5, 2), lambda *each: arrived.append(each))
    assert not arrived
    rows = pending(steps.append)
    assert sum(steps) == 2 * PARAMS.n and all(step > 0 for step in steps)
    assert dict(arrived) == {
        position * PARAMS.n + number: completion
        for position, row in zip(range(1, 5, 2), rows, strict=True)
        for number, completion in enumerate(row)
    }
    assert len(arrived) == 2 * PARAMS.n
    assert engine.submit(PROMPTS, PARAMS, range(0))() == []
