"""Servers of a teacher: they share responses and stand in for each other; what they refuse ends the run."""

from __future__ import annotations

import asyncio
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_server import FakeServer, with_servers

from launch import REPO
from megatron_fspo.config import Config
from megatron_fspo.data.tokenizer import load_tokenizer
from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.rollout.client.pool import Pool
from megatron_fspo.rollout.client.server import Server, ServerLost
from megatron_fspo.trainer import teacher
from megatron_fspo.trainer.rollout import Rollout, describe, make_rollout
from megatron_fspo.types import Completion, Prompt

pytestmark = pytest.mark.usefixtures("short_waits")

TOKENIZER = load_tokenizer(REPO / "examples/make_sum/checkpoint")
VOCABULARY = str(TOKENIZER.decode(range(len(TOKENIZER))))

RESPONSES = [
    Completion(token_ids=[3, 4, 5], log_probs=[-1.0] * 3, finish_reason="stop", weight_version=0),
    Completion(  # two rows; the second begins with the inserted 7
        token_ids=[3, 7, 5, 6],
        log_probs=[-1.0] * 4,
        loss_mask=[1, 0, 1, 1],
        row_starts=(1,),
        finish_reason="stop",
        weight_version=0,
    ),
]


def rollout() -> Rollout:
    prompts = [Prompt(index=i, token_ids=(1, 2), text="", answer="") for i in range(2)]
    table = torch.tensor([describe(one, 0) for one in RESPONSES], dtype=torch.float64)
    return make_rollout(prompts, 1, table, dict(enumerate(RESPONSES)))


async def servers_of(fakes: list[FakeServer], *texts: str, seconds: float = 600.0) -> teacher.TeacherServers:
    """Their client; ``texts`` are what they decode the whole vocabulary to, the policy's by default."""
    for fake, text in zip_longest(fakes, texts):
        fake.answers["/detokenize"] = {"prompt": text or VOCABULARY}
        fake.answers["/v1/models"] = {"data": [{"max_model_len": 1033}, {"max_model_len": None}]}
    return await client_of(fakes, seconds)


async def client_of(fakes: list[FakeServer], seconds: float = 600.0) -> teacher.TeacherServers:
    given: Any = {
        "run": {"steps": 1},
        "model": {"checkpoint": Path("c")},
        "data": {"train": "t"},
        "reward": {"name": "make_sum"},
        "rollout": {"prompts": 4, "max_response_tokens": 8},
        "loss": {"name": "fspo", "kl_coef": 1.0},
        "teacher": {"urls": [fake.url for fake in fakes]},
        "vllm": {"recovery_seconds": seconds},
    }
    inputs: Any = SimpleNamespace(config=Config.model_validate(given), tokenizer=TOKENIZER)
    return await asyncio.to_thread(teacher.TeacherServers, inputs)


async def scored(servers: teacher.TeacherServers) -> tuple[dict[int, Completion], list[int]]:
    done: list[int] = []
    return await asyncio.to_thread(servers.score, rollout(), done.append), done


@with_servers(2)
async def test_every_token_is_scored_in_its_row(
    pool: Pool, fakes: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    ask = Server._ask

    async def noted(self: Server, *words: Any, seconds: float, **more: Any) -> Any:
        limits.append(seconds)
        return await ask(self, *words, seconds=seconds, **more)

    servers = await servers_of(fakes)
    monkeypatch.setattr(Server, "_ask", noted)
    responses, done = await scored(servers)
    assert min(limits) >= 1800  # they wait behind those of all ranks
    assert [list(one.reference) for one in responses.values()] == [[-1.0] * 3, [-1.0, 0.0, -1.0, -1.0]]
    assert sum(done) == 2 and all(fake.bodies for fake in fakes)
    asked = [body["token_ids"] for fake in fakes for body in fake.bodies]
    assert sorted(asked) == [[1, 2, 3], [1, 2, 3, 4, 5], [7, 5, 6]]


@with_servers(2)
async def test_another_server_stands_in(
    pool: Pool, fakes: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "_RETRY_SECONDS", 0.01)
    servers = await servers_of(fakes)
    fakes[1].kill()
    responses, _ = await scored(servers)
    assert all(len(one.reference) == len(one.token_ids) for one in responses.values())


@with_servers(2)
async def test_a_server_lost_after_a_long_wait_is_stood_in_for(
    pool: Pool, fakes: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit counts from the loss, not from the request."""
    monkeypatch.setattr(teacher, "_RETRY_SECONDS", 0.01)
    servers, score, lost = await servers_of(fakes, seconds=0.1), Server.score, [True]

    async def late(self: Server, *words: Any, **more: Any) -> list[float]:
        if lost and lost.pop():
            await asyncio.sleep(0.3)
            raise ServerLost("gone")
        return await score(self, *words, **more)

    monkeypatch.setattr(Server, "score", late)
    responses, _ = await scored(servers)
    assert all(len(one.reference) == len(one.token_ids) for one in responses.values())


@with_servers(1)
async def test_servers_that_do_not_answer_or_refuse_end_the_run(
    pool: Pool, fakes: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "_RETRY_SECONDS", 0.01)
    servers = await servers_of(fakes, seconds=0.1)
    fakes[0].key = "another"
    with pytest.raises(TrainingError, match=r"refused with 401.*vocabulary"):
        await scored(servers)
    fakes[0].kill()
    with pytest.raises(TrainingError, match=r"no answer for 0\.1 s \(vllm.recovery_seconds\)"):
        await scored(servers)


@with_servers(2)
async def test_every_server_decodes_as_the_policy(
    pool: Pool, fakes: list[FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "_RETRY_SECONDS", 0.01)
    await servers_of(fakes, f" {VOCABULARY}")  # versions differ in spaces
    with pytest.raises(InputError, match=f"{fakes[1].url} has another vocabulary"):
        await servers_of(fakes, VOCABULARY, VOCABULARY[::-1])
    for fake, length in zip(fakes, (1033, 1032), strict=True):  # a prompt of 1,024, 8 tokens, and one more
        fake.answers["/detokenize"] = {"prompt": VOCABULARY}
        fake.answers["/v1/models"] = {"data": [{"max_model_len": length}]}
    with pytest.raises(InputError, match=f"{fakes[1].url} scores 1031 tokens at most.*_prompt_tokens.*1032"):
        await client_of(fakes)
    fakes[1].kill()
    with pytest.raises(TrainingError, match=f"{fakes[1].url}.*no answer for 0.1 s"):
        await servers_of(fakes, seconds=0.1)  # nobody stands in for a server that is not checked
    fakes[0].answers["/detokenize"] = ["prompt"]
    with pytest.raises(TrainingError, match="has no prompt"):
        await client_of(fakes[:1])
