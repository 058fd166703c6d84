"""One server over HTTP: what is tried again, what is not, and what is never told."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import fake_server
import httpx
import pytest
import torch
from fake_server import KEY, PARAMS, UPDATE, FakeServer, good_answer, tokens_of, with_server

from megatron_fspo.errors import InputError
from megatron_fspo.job import remote
from megatron_fspo.rollout.client import proof, send_weights
from megatron_fspo.rollout.client import server as server_module
from megatron_fspo.rollout.client.answers import BadAnswer
from megatron_fspo.rollout.client.send_weights import BroadcastSender
from megatron_fspo.rollout.client.server import Refused, Server, ServerLost

pytestmark = pytest.mark.usefixtures("short_waits")


@with_server
async def test_4xx_is_the_servers_words_and_not_tried_again(server: Server, fake: FakeServer) -> None:
    fake.said = f"no model by that name,\nkey {KEY}"
    fake.script.extend(statuses := [400, 401, 404, 422, 302])
    for status in statuses:
        with pytest.raises(Refused, match=rf"refused with {status}: no model by that name, key \*\*\*"):
            await server.post("inference/v1/generate", {}, attempts=5)
    assert len(fake.arrived) == len(statuses)


@pytest.mark.parametrize("failure", [429, 500, 503, "close", "drop"])
@with_server
async def test_what_may_pass_is_tried_again(server: Server, fake: FakeServer, failure: str | int) -> None:
    fake.script.extend([failure, failure])
    assert await server.post("x", {}, attempts=3)
    assert len(fake.arrived) == 3
    fake.script.extend([failure, failure])
    with pytest.raises(ServerLost, match=r"/x: attempt 2 of 2: "):
        await server.post("x", {}, attempts=2)
    assert len(fake.arrived) == 5


@with_server
async def test_a_server_that_stops_at_strings_of_another_text_is_asked_without_them(
    server: Server, fake: FakeServer
) -> None:
    sent = good_answer(7)
    sent["choices"][0]["finish_reason"] = "stop"
    whole = fake._send

    async def send(writer: Any, status: int, body: bytes, length: int | None = None) -> bool:
        stops = fake.bodies[-1]["sampling_params"]["stop"]
        return await whole(writer, status, json.dumps(sent).encode() if stops else body, length)

    fake._send = send  # type: ignore[method-assign]
    params = replace(PARAMS, stop=("x",), decode=lambda ids: "")
    found = await server.generate((1, 2), params, seed=7, timeout=5)
    assert tuple(found.token_ids) == tokens_of(7) and found.finish_reason == "length"
    asked = [body["sampling_params"] for body in fake.bodies]
    told = [(one["stop"], one["detokenize"], one["seed"]) for one in asked]
    assert told == [(["x"], True, 7), ([], False, 7)]


@with_server
async def test_waits_double_up_to_a_limit(
    server: Server, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    fake.kill()
    monkeypatch.setattr(remote.asyncio, "sleep", sleep)
    monkeypatch.setattr(remote, "_FIRST_WAIT", 1.0)
    with pytest.raises(ServerLost, match="ConnectError"):
        await server.get("health", attempts=7)
    middle = [1, 2, 4, 8, 16, 30]
    assert all(0.5 * m <= wait <= 1.5 * m for wait, m in zip(waits, middle, strict=True))
    assert waits != middle


@with_server
async def test_no_answer_in_time_and_half_of_one_are_not_tried_again(
    server: Server, fake: FakeServer
) -> None:
    fake.script.extend(["hang", "cut"])
    with pytest.raises(ServerLost, match=r"no answer in 0\.05 s"):
        await server.post("x", {}, attempts=3, timeout=0.05)
    with pytest.raises(BadAnswer, match=r"/x: the answer of .* bytes is not JSON"):
        await server.post("x", {}, attempts=3)
    assert len(fake.arrived) == 2


@pytest.mark.parametrize("reason", ["abort", "error"])
@with_server
async def test_a_response_that_the_server_ended_is_asked_for_elsewhere(
    server: Server, fake: FakeServer, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    sent = good_answer(7)
    sent["choices"][0]["finish_reason"] = reason
    monkeypatch.setattr(fake_server, "good_answer", lambda *_: sent)
    with pytest.raises(ServerLost, match=f"finish_reason '{reason}': the server"):
        await server.generate((1, 2), PARAMS, seed=7, timeout=5)
    assert server.ended == {reason: 1}


@with_server
async def test_an_answer_that_is_too_long_is_not_read(
    server: Server, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_LARGEST", 10)
    monkeypatch.setattr(server_module, "_LARGEST_PER_TOKEN", 2)
    most = 10 + 2 * (2 + PARAMS.max_tokens)
    with pytest.raises(BadAnswer, match=rf"generate: more than {most} bytes$"):
        await server.generate((1, 2), PARAMS, seed=7, timeout=5)
    assert len(fake.arrived) == 1


@pytest.mark.parametrize("failure", [400, 500, "close", "cut", "drop", "hang"])
@with_server
async def test_the_key_is_sent_and_never_told(
    server: Server, fake: FakeServer, failure: str | int, caplog: pytest.LogCaptureFixture
) -> None:
    fake.always, fake.said = failure, f"you said Bearer {KEY}"
    with caplog.at_level(logging.DEBUG), pytest.raises((Refused, ServerLost, BadAnswer)) as raised:
        await server.post("x", {}, timeout=0.2, attempts=2)
    assert all(f"authorization: bearer {KEY}" in head.lower() for head in fake.headers)
    error: BaseException | None = raised.value
    said = [repr(server), str(server), repr(vars(server)["_headers"])]
    while error is not None:
        said.append(repr(error))
        error = error.__cause__ or error.__context__
    assert KEY not in " ".join(said)
    assert KEY not in caplog.text


@pytest.mark.parametrize(
    "answer",
    [
        {"error": f"Bearer {KEY}\n{'x' * 1000}"},
        {"model": "policy", "choices": [{"token_ids": [1], "finish_reason": f"{KEY}\n{'x' * 1000}"}]},
    ],
)
@with_server
async def test_what_is_wrong_with_an_answer_is_one_line_without_the_key(
    server: Server, fake: FakeServer, answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_server, "good_answer", lambda *_: answer)
    with pytest.raises(BadAnswer, match=rf"^{server.url}: .*\*\*\*") as raised:
        await server.generate([1], PARAMS, seed=0, timeout=5)
    assert KEY not in str(raised.value) and "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("answer", [f"Bearer {KEY}", {"success": KEY}, {KEY: [f"{KEY}\n"]}])
@with_server
async def test_the_odd_answer_of_a_control_route_is_shown_without_the_key(
    server: Server, fake: FakeServer, answer: object
) -> None:
    fake.answers = {"/get_world_size": answer, UPDATE[-2]: answer}
    with pytest.raises(BadAnswer, match=r"/get_world_size: .*\*\*\*.* is not a number of workers") as one:
        await BroadcastSender("gloo", address="127.0.0.1").connect([server])
    with pytest.raises(BadAnswer, match=r"/reset_prefix_cache: .*\*\*\*.* leaves keys and values") as two:
        await send_weights._finish([server], 3)
    for raised in (one, two):
        assert KEY not in str(raised.value) and "\n" not in str(raised.value)


@with_server
async def test_what_a_server_calls_its_tensors_is_shown_without_the_key(
    server: Server, fake: FakeServer
) -> None:
    fake.weights = {f"weight.{KEY}": torch.ones(2)}
    _, said = await proof.prove(server, {}, {})
    assert "on one side only): 1, such as weight.***" in said


@pytest.mark.parametrize("key", ["two words", "line\n", 'quote"', "back\\slash", "ünicode", "", "="])
def test_a_key_that_would_be_written_in_another_way_is_refused(key: str) -> None:
    """Otherwise it would not be found where a server repeats it."""
    with pytest.raises(InputError, match="the API key in VLLM_API_KEY"):
        Server("http://server", httpx.AsyncClient(), api_key=key)


@pytest.mark.parametrize(
    "url", ["", "server:8000", "ftp://server", "http://", "http://server?x=1", "http://a b"]
)
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(InputError, match="rollout server"):
        Server(url, httpx.AsyncClient())


def test_secrets_that_do_not_fit_are_not_echoed() -> None:
    for url, key in ((f"http://me:{KEY}@server", None), ("http://server", f"{KEY}\n")):
        with pytest.raises(InputError) as raised:
            Server(url, httpx.AsyncClient(), api_key=key)
        assert KEY not in str(raised.value)
