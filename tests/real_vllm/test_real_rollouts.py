"""Rollouts scored by transformers; what a server refuses, stops at and repeats."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launch import REPO
from megatron_fspo.config.loading import load_config
from megatron_fspo.data.tokenizer import load_tokenizer
from megatron_fspo.job.remote import http_client
from megatron_fspo.rollout.client.server import Refused, Server
from megatron_fspo.rollout.common import api_key
from megatron_fspo.rollout.sampling import kept
from megatron_fspo.trainer.rollout import describe, make_rollout
from megatron_fspo.trainer.teacher import TeacherServers
from megatron_fspo.types import Completion, Prompt, Reply, SamplingParams, VersionSpan
from real_server import all_log_probs, sampled, scores, send, weights
from serving import Served

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

VOCAB_SIZE, EOS = 14, 12  # of make-sum
PROMPTS = [
    Prompt(
        index=i,
        token_ids=tuple((7 * i + 31 * j + 3) % VOCAB_SIZE for j in range(1 + 5 * i)),
        text="",
        answer="",
    )
    for i in range(8)
]


def rollout(url: str, params: SamplingParams) -> list[Completion]:
    return sampled(url, PROMPTS, params, probe_seconds=0.2)


@pytest.fixture(scope="module")
def url(both: list[Served], checkpoints: list[Path]) -> str:
    """Of a server with random weights, version 3. The other one may just be coming back."""
    assert send(both[0].url, weights(checkpoints[1]).items(), 3) is None
    return both[0].url


def test_a_teachers_log_probs_are_those_of_transformers(
    url: str, checkpoint: Path, checkpoints: list[Path]
) -> None:
    completions = rollout(url, SamplingParams(n=1, max_tokens=24, seed=6))
    words = f"--teacher.urls=['{url}'] --loss.kl-coef=1"
    config = load_config(REPO / "examples/make_sum/run.toml", words.split())
    table = torch.tensor([describe(one, 0) for one in completions], dtype=torch.float64)
    held = make_rollout(PROMPTS, 1, table, dict(enumerate(completions)))
    inputs: Any = SimpleNamespace(config=config, tokenizer=load_tokenizer(checkpoint))
    scored = TeacherServers(inputs).score(held, lambda _: None)
    for number, one in scored.items():
        wanted = scores(checkpoints[1], (*PROMPTS[number].token_ids, *one.token_ids), 1.0)[-24:]
        assert (torch.tensor(one.reference) - wanted).abs().mean() <= 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_transformers(url: str, checkpoints: list[Path], temperature: float) -> None:
    completions = rollout(url, SamplingParams(n=8, temperature=temperature, max_tokens=24, seed=5))
    errors = [
        (
            scores(checkpoints[1], (*PROMPTS[i // 8].token_ids, *completion.token_ids), temperature)[-24:]
            - torch.tensor(completion.log_probs)
        )
        for i, completion in enumerate(completions)
    ]
    assert torch.stack(errors).shape == (64, 24) and torch.stack(errors).abs().mean() <= 1e-4
    assert len({tuple(completion.token_ids) for completion in completions}) == 64
    assert {c.version_spans for c in completions} == {(VersionSpan(version=3, start=0, end=24),)}


class Inserts:
    """Two tokens after every turn; after the second they begin a row."""

    limit_seconds = 60.0

    def answer(self, prompt: Prompt, turns: Sequence[Sequence[int]], trajectory: object) -> Future[Reply]:
        reply: Future[Reply] = Future()
        reply.set_result(Reply(token_ids=(7, len(turns)), restarts=len(turns) == 2))
        return reply


def test_log_probs_of_turns_are_given_all_that_was_written_and_inserted(
    url: str, checkpoints: list[Path]
) -> None:
    params = SamplingParams(
        n=8, max_tokens=40, stop_token_ids=(4, 5, 6), seed=5, environment=Inserts(), turns=4
    )
    errors, turns = [], Counter[int]()
    for i, one in enumerate(rollout(url, params)):
        ids = (*PROMPTS[i // 8].token_ids, *one.token_ids)
        start = len(ids) - len(one.token_ids)
        borders = [0, *(start + place for place in one.row_starts), len(ids)]
        rows = [scores(checkpoints[1], ids[first:end], 1.0) for first, end in pairwise(borders)]
        # No row says anything of its first token.
        whole = torch.cat([torch.cat([torch.zeros(1), row]) for row in rows])[start:]
        written = torch.tensor(one.loss_mask, dtype=torch.bool)
        errors.append((whole - torch.tensor(one.log_probs))[written])
        assert len(one.row_starts) == (len(one.turns) > 2)
        turns[len(one.turns)] += 1
        for number, (before, after) in enumerate(pairwise(one.turns), start=1):
            assert list(one.token_ids[before.stop : after.start]) == [7, number]
            assert one.token_ids[before.stop - 1] in params.stop_token_ids
    assert turns[4] > 5 and torch.cat(errors).abs().mean() <= 1e-4


def test_a_server_stops_at_strings_by_itself(url: str, both: list[Served], checkpoint: Path) -> None:
    """And where ours would: a token later, and the rest would be cut off and missing here."""
    tokenizer = load_tokenizer(checkpoint)
    before = both[0].count("generation_tokens")
    params = SamplingParams(
        n=8, max_tokens=24, seed=5, stop=("7", "12", "3^"), decode=lambda ids: str(tokenizer.decode(ids))
    )
    completions = rollout(url, params)
    ends = [kept(completion.token_ids, params) for completion in completions]
    lengths = [len(completion.token_ids) for completion in completions]
    stopped = [completion.finish_reason == "stop" for completion in completions]
    assert ends == [length if stop else None for length, stop in zip(lengths, stopped, strict=True)]
    assert sum(stopped) > 32 and len(set(lengths)) > 8
    assert both[0].count("generation_tokens") - before == sum(lengths)


def test_greedy_takes_the_likeliest(url: str, checkpoints: list[Path]) -> None:
    completions = rollout(url, SamplingParams(temperature=0.0, max_tokens=8))
    for prompt, found in zip(PROMPTS, completions, strict=True):
        likeliest = all_log_probs(checkpoints[1], (*prompt.token_ids, *found.token_ids)).argmax(-1)
        assert likeliest[-8:].tolist() == list(found.token_ids)
        assert list(found.log_probs) == [0.0] * 8


def test_stop_tokens_and_max_tokens(url: str) -> None:
    """Responses end with the first stop token or at the limit, and the checkpoint's EOS is like any token."""
    stops = (4, 5)
    completions = rollout(url, SamplingParams(n=16, max_tokens=12, stop_token_ids=stops, temperature=1.5))
    for completion in completions:
        assert not set(completion.token_ids[:-1]) & set(stops)
        assert (completion.token_ids[-1] in stops) == (completion.finish_reason == "stop")
        assert len(completion.token_ids) == 12 or completion.finish_reason == "stop"
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    hot = rollout(url, SamplingParams(n=16, max_tokens=60, temperature=2.0))
    assert any(EOS in completion.token_ids[:-1] for completion in hot)


def test_a_seed_names_the_tokens(url: str) -> None:
    first, again, other = (
        [tuple(c.token_ids) for c in rollout(url, SamplingParams(n=4, max_tokens=16, seed=seed))]
        for seed in (9, 9, 10)
    )
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_a_refusal_has_the_servers_words(url: str) -> None:
    async def ask() -> None:
        async with http_client() as http:
            server = Server(url, http, api_key=api_key())
            assert await server.longest() == 128
            with pytest.raises(Refused, match=r"refused with 400: .*128"):
                await server.generate([5] * 130, SamplingParams(max_tokens=4), seed=0, timeout=30)
            assert await server.healthy()

    asyncio.run(ask())
