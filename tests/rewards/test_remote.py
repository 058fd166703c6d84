"""``http``: a verifier behind a URL, and all that goes wrong there."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from time import sleep
from typing import Any

import pytest
from answers import STOPPED, prompt

from megatron_fspo.config import Reward
from megatron_fspo.job.remote import Loop
from megatron_fspo.rewards import Failure, Grade, Grader

Reply = tuple[int, bytes] | None
"""Status and content; None where the connection just ends."""


@dataclass
class Verifier:
    """A server, and what it was asked."""

    reply: Callable[[int], Reply] = lambda number: (200, b'{"reward": 1}')
    """Takes the number of the request."""
    seconds: float = 0.0
    asked: list[dict[str, Any]] = field(default_factory=list)
    at_a_time: int = 0
    most: int = 0
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):  # who asked may be gone
            try:
                await self.answer(reader, writer)
            finally:
                writer.close()
                await writer.wait_closed()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (length,) = re.findall(rb"content-length: (\d+)", (await reader.readuntil(b"\r\n\r\n")).lower())
        self.asked.append(json.loads(await reader.readexactly(int(length))))
        reply = self.reply(len(self.asked))
        self.at_a_time += 1
        self.most = max(self.most, self.at_a_time)
        await asyncio.sleep(self.seconds)
        self.at_a_time -= 1
        if reply is not None:
            head = f"HTTP/1.1 {reply[0]} .\r\nContent-Length: {len(reply[1])}\r\n\r\n"
            writer.write(head.encode() + reply[1])


@pytest.fixture
def verifier(monkeypatch: pytest.MonkeyPatch) -> Iterator[Verifier]:
    monkeypatch.setattr("megatron_fspo.job.remote._FIRST_WAIT", 0.01)
    verifier = Verifier()
    with Loop("verifier", grace_seconds=1) as loop:
        server = loop.run(asyncio.start_server(verifier.serve, "127.0.0.1", 0, backlog=128))
        verifier.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/grade"
        yield verifier
        loop.run(server.__aexit__())


def make(verifier: Verifier, **keys: Any) -> Grader:
    return Grader(Reward(**({"name": "http", "url": verifier.url} | keys)), max_response_tokens=10)


def ask(grader: Grader, response: str = "x", **fields: Any) -> Future[Grade | Failure]:
    return grader.submit(prompt("5", index=3, fields=fields), STOPPED, response)


def test_what_is_asked_and_answered(verifier: Verifier) -> None:
    verifier.reply = lambda number: (200, b'{"reward": 0.5, "answer": "y", "why": "so"}')
    with make(verifier) as grader:
        found = ask(grader, "half a character: \ud800", level=3).result(timeout=20)
    assert found == Grade(reward=0.5, score=0.5, answer="y")
    assert verifier.asked == [
        {"prompt": "?", "response": "half a character: \ud800", "answer": "5", "fields": {"level": 3}}
    ]


@pytest.mark.parametrize("bad", [(503, b"later"), (429, b"slower"), (500, b""), None])
def test_what_may_pass_is_tried_again(verifier: Verifier, bad: Reply) -> None:
    verifier.reply = lambda number: bad if number < 3 else (200, b'{"reward": true}')
    with make(verifier, retries=2) as grader:
        assert ask(grader).result(timeout=20) == Grade(reward=1.0, score=1.0, answer=None)
    assert len(verifier.asked) == 3


@pytest.mark.parametrize(
    ("reply", "attempts", "problem"),
    [
        ((503, b"too\nbusy"), 3, "got no grade from {url}: attempt 3 of 3: 503: too busy"),
        (None, 3, "got no grade from {url}: attempt 3 of 3: RemoteProtocolError "),
        ((404, b"no such page"), 1, "got no grade from {url}: 404: no such page"),
        ((302, b""), 1, "got no grade from {url}: 302: (no message)"),
        ((200, b"fine"), 1, "got no "),
        ((200, b'{"reward": "1"}'), 1, "got no "),
        ((200, b'{"reward": null}'), 1, "got no "),
        ((200, b'{"reward": NaN}'), 1, "returned nan instead of a finite number"),
        ((200, b'{"reward": 1' + b"0" * 400 + b"}"), 1, "returned 1000"),
        ((200, b'{"reward": 1, "answer": 5}'), 1, "got no "),
        ((200, b"[1]"), 1, "got no "),
        ((200, b'{"reward": -1e308}'), 1, "returned -1e+308 instead of "),
        (
            (200, b'{"reward": 1, "why": "' + b"x" * 2**21 + b'"}'),
            1,
            "got no grade from {url}: more than 1048576 bytes",
        ),
        ((200, b"[" * 100_000), 1, "got no "),
        ((200, b"\xff\xfe"), 1, "got no "),
    ],
)
def test_no_verdict_is_a_failure_and_never_0(
    verifier: Verifier, reply: Reply, attempts: int, problem: str
) -> None:
    verifier.reply = lambda number: reply
    with make(verifier, retries=2) as grader:
        found = ask(grader).result(timeout=20)
    assert isinstance(found, Failure)
    assert found.problem.startswith(problem.replace("{url}", verifier.url)), found.problem
    assert found.prompt.index == 3 and len(found.problem) < 500 and "\n" not in found.problem
    assert len(verifier.asked) == attempts


def test_a_verifier_that_is_not_there_or_does_not_answer(verifier: Verifier) -> None:
    verifier.seconds = 1.0
    with make(verifier, retries=1, seconds=0.3) as grader:
        found = ask(grader).result(timeout=20)
    assert isinstance(found, Failure)
    assert found.problem.endswith("attempt 2 of 2: no answer in 0.3 s")
    with make(verifier, retries=1, url="http://127.0.0.1:9/") as grader:
        found = ask(grader).result(timeout=20)
    assert isinstance(found, Failure) and "ConnectError" in found.problem


def test_fields_that_are_no_json(verifier: Verifier) -> None:
    with make(verifier) as grader:
        for bad in ({1, 2}, float("nan")):
            found = ask(grader, level=bad).result(timeout=20)
            assert isinstance(found, Failure) and "fields as JSON" in found.problem
    assert verifier.asked == []


def test_concurrency_bounds_the_requests(verifier: Verifier) -> None:
    verifier.seconds = 0.05
    with make(verifier, concurrency=4) as grader:
        found = [future.result(timeout=20) for future in [ask(grader) for _ in range(40)]]
    assert found == [Grade(reward=1.0, score=1.0, answer=None)] * 40
    assert 2 <= verifier.most <= 4


def test_closing_while_it_is_asked(verifier: Verifier) -> None:
    verifier.seconds = 0.5
    grader = make(verifier)
    futures = [ask(grader) for _ in range(5)]
    sleep(0.1)
    grader.close()
    assert all(future.cancelled() for future in futures)
