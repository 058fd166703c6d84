"""Turns in both engines: every token is there once, from whoever wrote it, under the right context."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from test_embedded import PARAMS, PROMPTS, STOP, Markov

from megatron_fspo.errors import TrainingError
from megatron_fspo.rollout.client.pool import CompletionRequest, Pool
from megatron_fspo.rollout.client.server import Server, ServerLost
from megatron_fspo.rollout.embedded import EmbeddedEngine
from megatron_fspo.rollout.sampling import sample, turn_seed, uniforms
from megatron_fspo.rollout.trajectory import Trajectory
from megatron_fspo.trainer.rollout import COLUMNS, describe
from megatron_fspo.types import Completion, Prompt, Reply, SamplingParams, VersionSpan


class Echo:
    """Says the first token of the turn once for each turn so far; ends after a turn of two tokens, and after
    the third with as much reward as the turns had tokens. Every turn of three tokens fails. After a turn of
    one token the trajectory begins anew with what it says, for the prompts of ``forgotten``."""

    forgotten: tuple[int, ...] = ()
    limit_seconds: float = 20.0

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[list[int]]]] = []

    def answer(self, prompt: Prompt, turns: Sequence[Sequence[int]], trajectory: object) -> Future[Reply]:
        self.asked.append((prompt.index, [list(turn) for turn in turns]))
        result: Future[Reply] = Future()
        result.set_result(self.reply(turns, prompt.index in self.forgotten))
        return result

    def reply(self, turns: Sequence[Sequence[int]], forgets: bool) -> Reply:
        failed = len(turns[-1]) == 3
        if len(turns[-1]) == 2:
            return Reply(failed=failed)
        if len(turns) == 3:
            return Reply(reward=float(sum(map(len, turns))), failed=failed)
        restarts = forgets and len(turns[-1]) == 1
        return Reply(token_ids=(turns[-1][0],) * len(turns), failed=failed, restarts=restarts)


def alone(prompt: Prompt, number: int, params: SamplingParams, version: int = 0) -> Completion:
    """One trajectory, token by token, with nothing beside it."""
    environment: Any = params.environment
    model, ids, log_probs, mask = Markov(), list(prompt.token_ids), [], []
    draws = iter(uniforms(params.seed, prompt.index, number, params.max_tokens))
    start = first = len(ids)
    row, row_starts = 0, []
    turns: list[list[int]] = []
    failures, reward, end = 0, None, start + params.max_tokens
    while True:
        limit = min(end, first + (params.turn_tokens or params.max_tokens))
        limit = min(limit, row + (params.context_tokens or limit))
        while len(ids) < limit and not (len(ids) > first and ids[-1] == STOP):
            logits, draw = model.logits(ids[row:])[None], next(draws)[None]
            token, log_prob = sample(logits, draw, temperature=params.temperature, top_p=params.top_p)
            ids.append(int(token))
            log_probs.append(log_prob.item())
        turns.append(ids[first:])
        mask += [1] * len(turns[-1])
        if ids[-1] != STOP:
            finish = "length"
            break
        reply = environment.reply(turns, prompt.index in environment.forgotten)
        failures += reply.failed
        if reply.token_ids is None:
            finish, reward = "stop", reply.reward
            break
        more = len(ids) + len(reply.token_ids)
        before = len(ids) if reply.restarts else row
        if len(turns) == params.turns or more >= min(end, before + (params.context_tokens or end)):
            finish = "length"
            break
        if reply.restarts:
            row = len(ids)
            row_starts.append(row - start)
        ids += reply.token_ids
        log_probs += [0.0] * len(reply.token_ids)
        mask += [0] * len(reply.token_ids)
        first = len(ids)
    return Completion(
        token_ids=ids[start:],
        log_probs=log_probs,
        loss_mask=mask,
        row_starts=tuple(row_starts),
        finish_reason=finish,  # type: ignore[arg-type]
        weight_version=version,
        reward=reward,
        failures=failures,
    )


@pytest.mark.parametrize("turns", [2, 8])
@pytest.mark.parametrize("turn_tokens", [None, 5])
@pytest.mark.parametrize("max_batch", [1, 4, 100])
def test_a_batch_of_trajectories_is_each_alone(max_batch: int, turn_tokens: int | None, turns: int) -> None:
    params = replace(
        PARAMS, n=6, max_tokens=20, environment=Echo(), turns=turns, turn_tokens=turn_tokens, temperature=1.3
    )
    got = EmbeddedEngine(Markov(), max_batch=max_batch).submit(PROMPTS, params)()
    assert got == [[alone(prompt, number, params) for number in range(6)] for prompt in PROMPTS]
    flat = list(chain(*got))
    assert {len(one.turns) for one in flat} == set(range(1, min(turns, 3) + 1))
    assert {one.finish_reason for one in flat} == {"stop", "length"}
    assert any(one.failures for one in flat) and any(one.length < len(one.token_ids) for one in flat)
    assert turns == 2 or {one.reward for one in flat} > {None}
    assert all(one.reward is None for one in flat if one.finish_reason == "length")
    for one in flat:
        assert all(one.log_probs[i] == 0 for i, own in enumerate(one.loss_mask) if not own)
        row = dict(zip(COLUMNS, describe(one, 0), strict=False))
        assert (row["lengths"], row["response_lengths"]) == (sum(one.loss_mask), len(one.token_ids))
        assert (row["turns"], row["failures"]) == (len(one.turns), one.failures)


def test_without_a_reply_a_trajectory_is_one_turn() -> None:
    one = replace(PARAMS, environment=Echo(), turns=1)
    got = EmbeddedEngine(Markov(), max_batch=100).submit(PROMPTS, one)()
    plain = EmbeddedEngine(Markov(), max_batch=100).submit(PROMPTS, PARAMS)()
    for some, others in zip(got, plain, strict=True):
        assert [list(c.token_ids) for c in some] == [list(c.token_ids) for c in others]
        assert [c.turns for c in others] == [(range(len(c.token_ids)),) for c in others]


@pytest.mark.parametrize("max_batch", [1, 4, 100])
@pytest.mark.parametrize("context_tokens", [None, 12])
def test_trajectories_that_begin_anew_are_each_alone(max_batch: int, context_tokens: int | None) -> None:
    environment = Echo()
    environment.forgotten = tuple(prompt.index for prompt in PROMPTS[::2])
    params = replace(PARAMS, n=8, max_tokens=20, environment=environment, turns=8, temperature=1.3)
    params = replace(params, context_tokens=context_tokens)
    got = EmbeddedEngine(Markov(), max_batch=max_batch).submit(PROMPTS, params)()
    assert got == [[alone(prompt, number, params) for number in range(8)] for prompt in PROMPTS]
    assert {len(one.row_starts) for one in chain(*got)} >= {0, 1}
    longest = 0
    for prompt, completion in (
        (prompt, one) for prompt, some in zip(PROMPTS, got, strict=True) for one in some
    ):
        borders = [-len(prompt.token_ids), *completion.row_starts, len(completion.token_ids)]
        longest = max(longest, *(end - start for start, end in pairwise(borders)))
    assert (longest <= 12) is (context_tokens == 12)


class Chain(Server):
    """A server that samples from the Markov chain, and is lost at some requests."""

    def __init__(self, url: str, lost_at: Sequence[int]) -> None:
        self.url, self._lost_at = url, lost_at
        self.requests: list[tuple[tuple[int, ...], int, int]] = []

    async def healthy(self) -> bool:
        return True

    async def generate(self, token_ids: Any, params: Any, *, seed: int, **_: Any) -> Completion:
        self.requests.append((token_ids, params.max_tokens, seed))
        number = len(self.requests)
        await asyncio.sleep(0)
        if number in self._lost_at:
            raise ServerLost("gone")
        return turn_of(token_ids, params, seed, version=number)


def turn_of(token_ids: Sequence[int], params: SamplingParams, seed: int, version: int) -> Completion:
    """One turn of the Markov chain; its last token by the next version."""
    model, ids, log_probs = Markov(), list(token_ids), []
    for draw in uniforms(seed, 0, 0, params.max_tokens):
        token, log_prob = sample(model.logits(ids)[None], draw[None], temperature=1.3, top_p=1.0)
        ids.append(int(token))
        log_probs.append(log_prob.item())
        if ids[-1] == STOP:
            break
    count = len(log_probs)
    spans = [VersionSpan(version=version, start=0, end=count - 1)] if count > 1 else []
    spans.append(VersionSpan(version=version + 1, start=count - 1, end=count))
    return Completion(
        token_ids=ids[len(token_ids) :],
        log_probs=log_probs,
        finish_reason="stop" if ids[-1] == STOP else "length",
        weight_version=spans[0].version,
        version_spans=tuple(spans),
    )


@pytest.mark.parametrize(("lost_at", "in_flight"), [((2,), 2), ((), 40)])
def test_servers_take_turns_and_only_a_lost_turn_is_asked_again(
    lost_at: tuple[int, ...], in_flight: int
) -> None:
    params = replace(PARAMS, max_tokens=20, environment=Echo(), turns=3)
    params.environment.forgotten = (4,)  # type: ignore[union-attr]
    servers = [Chain("a", lost_at), Chain("b", lost_at=())]

    async def run() -> list[Completion]:
        pool = Pool(servers, max_in_flight_per_server=in_flight, vocab_size=6, probe_seconds=0.01)
        prompt = Prompt(index=4, token_ids=(1, 2, 3), text="", answer="")
        return await pool.generate([CompletionRequest.of(prompt, params, i) for i in range(30)])

    completions = asyncio.run(run())
    sent = [(*request, server.url) for server in servers for request in server.requests]
    assert {len(one.turns) for one in completions} == {1, 2, 3}
    assert any(one.row_starts for one in completions)
    for number, one in enumerate(completions):
        request = CompletionRequest.of(
            Prompt(index=4, token_ids=(1, 2, 3), text="", answer=""), params, number
        )
        ids = (1, 2, 3, *one.token_ids)
        at = set()
        for turn, span in enumerate(one.turns):
            # The whole context as it stands, what is left of the tokens, and a stream of its own.
            row = max((3 + start for start in one.row_starts if start < span.start), default=0)
            asked = (ids[row : 3 + span.start], 20 - span.start, turn_seed(request.seed, turn))
            at.update(where for *what, where in sent if tuple(what) == asked)
            wanted = turn_of(*asked[:1], replace(params, max_tokens=asked[1]), asked[2], version=0)
            assert wanted.token_ids == one.token_ids[span.start : span.stop]
        assert at and (lost_at or len(at) == 1), "the server that knows the context"
        covered = [place for each in one.version_spans for place in range(each.start, each.end)]
        assert covered == list(range(len(one.token_ids)))
        assert one.weight_version == min(each.version for each in one.version_spans)
    seeds = [seed for *_, seed, _ in sent]
    assert len(seeds) - len(set(seeds)) == len(lost_at)
    assert len({turn_seed(5, turn) for turn in range(100)}) == 100 and turn_seed(5, 0) == 5


class Silent(Echo):
    """Answers the first turns, slowly, and no more."""

    limit_seconds = 0.5

    def answer(self, prompt: Prompt, turns: Sequence[Sequence[int]], trajectory: object) -> Future[Reply]:
        self.asked.append((prompt.index, []))
        result: Future[Reply] = Future()
        if len(self.asked) <= 4:
            threading.Timer(0.3 * len(self.asked), result.set_result, [Reply()]).start()
        return result


@pytest.mark.parametrize("embedded", [True, False])
def test_an_environment_that_is_silent_for_too_long_ends_the_run(embedded: bool) -> None:
    params = replace(PARAMS, n=30, max_tokens=20, environment=Silent(), turns=3)

    async def run() -> list[Completion]:
        pool = Pool([Chain("a", ())], max_in_flight_per_server=40, vocab_size=6)
        return await pool.generate([CompletionRequest.of(PROMPTS[0], params, i) for i in range(30)])

    began = time.monotonic()
    with pytest.raises(TrainingError, match=r"Silent has sent no reply for 0.5 s, to prompt \d"):
        EmbeddedEngine(Markov(), max_batch=100).submit(PROMPTS, params)() if embedded else asyncio.run(run())
    assert 1.6 < time.monotonic() - began < 10, "replies that come late are waited for while any comes"


def test_versions_count_what_the_policy_wrote() -> None:
    one = Completion(
        token_ids=range(10),
        log_probs=[0.0] * 10,
        loss_mask=[1, 1, 1, 0, 0, 1, 0, 0, 1, 1],
        finish_reason="stop",
        weight_version=2,
        version_spans=(VersionSpan(version=2, start=0, end=5), VersionSpan(version=7, start=5, end=10)),
    )
    row = dict(zip(COLUMNS, describe(one, 0), strict=False))
    assert row["version_tokens"] == 3 * 2 + 3 * 7 and row["last_start"] == 5 and row["turns"] == 3
    assert one.length == 6 and one.turns == (range(3), range(5, 6), range(8, 10))


def test_a_turn_ends_where_nothing_is_inserted_after_it() -> None:
    trajectory = Trajectory(PROMPTS[0], replace(PARAMS, environment=Echo(), turns=4))
    for ids, reply in (((1, STOP), ()), ((2, STOP), (3,)), ((1, 1, STOP), ()), ((STOP,), None)):
        part = Completion(token_ids=ids, log_probs=[-1.0] * len(ids), finish_reason="stop", weight_version=0)
        assert trajectory.add(part)
        trajectory.take(Reply(token_ids=reply))
    one = trajectory.completion()
    assert list(one.loss_mask) == [1, 1, 1, 1, 0, 1, 1, 1, 1]
    assert one.turns == (range(2), range(2, 4), range(5, 8), range(8, 9))


@pytest.mark.parametrize("mask", [(1, 1), (1, 1, 1, 1), (0, 2, 1), (1, -1, 1)])
def test_a_loss_mask_is_0_or_1_for_each_token(mask: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="loss_mask = "):
        Completion(
            token_ids=range(3),
            log_probs=torch.zeros(3).tolist(),
            loss_mask=mask,
            finish_reason="stop",
            weight_version=0,
        )
