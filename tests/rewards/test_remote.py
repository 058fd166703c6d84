"""``http``: a verifier behind a URL, and all that goes wrong there."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from answers import STOPPED, prompt

from megatron_fspo.config import Reward
from megatron_fspo.rewards import Failure, Grade, Grader

Reply = tuple[int, bytes] | None


@dataclass
class Verifier:
    """A server in a thread."""

    reply: Callable[[dict[str, Any], int], Reply] = lambda asked, number: (200, b'{"reward": 1}')
    asked: list[dict[str, Any]] = field(default_factory=list)
    at_a_time: int = 0
    most: int = 0
    url: str = ""


@pytest.fixture
def verifier(monkeypatch: pytest.MonkeyPatch) -> Iterator[Verifier]:
    monkeypatch.setattr("megatron_fspo.rewards.remote._FIRST_WAIT", 0.01)
    state = Verifier()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                state.asked.append(asked)
                number = len(state.asked)
                state.at_a_time += 1
                state.most = max(state.most, state.at_a_time)
            reply = state.reply(asked, number)
            with lock:
                state.at_a_time -= 1
            if reply is None:
                self.connection.close()
                return
            self.send_response(reply[0])
            self.send_header("Content-Length", str(len(reply[1])))
            self.end_headers()
            self.wfile.write(reply[1])

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def finish(self) -> None:
            try:
                super().finish()
            except (OSError, ValueError):
                pass  # we closed it

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass

    with Server(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_port}/grade"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield state
        server.shutdown()
        thread.join()


def make(verifier: Verifier, **keys: Any) -> Grader:
    return Grader(Reward(**({"name": "http", "url": verifier.url} | keys)), max_response_tokens=10)


def ask(grader: Grader, response: str = "x", **fields: Any) -> Future[Grade | Failure]:
    return grader.submit(prompt("5", index=3, fields=fields), STOPPED, response)


def test_what_is_asked_and_answered(verifier: Verifier) -> None:
    verifier.reply = lambda asked, number: (
        200,
        json.dumps({"reward": 0.5, "answer": "y", "why": "so"}).encode(),
    )
    with make(verifier) as grader:
        found = ask(grader, "half a character: \ud800", level=3).result(timeout=20)
    assert found == Grade(reward=0.5, score=0.5, answer="y")
    assert verifier.asked == [
        {"prompt": "?", "response": "half a character: \ud800", "answer": "5", "fields": {"level": 3}}
    ]


@pytest.mark.parametrize("bad", [(503, b"later"), (429, b"slower"), (500, b""), None])
def test_what_may_pass_is_tried_again(verifier: Verifier, bad: Reply) -> None:
    verifier.reply = lambda asked, number: bad if number < 3 else (200, b'{"reward": true}')
    with make(verifier, retries=2) as grader:
        assert ask(grader).result(timeout=20) == Grade(reward=1.0, score=1.0, answer=None)
    assert len(verifier.asked) == 3


@pytest.mark.parametrize(
    ("reply", "attempts", "problem"),
    [
        ((503, b"too\nbusy"), 3, "got no verdict from {url}: 503 too busy (attempt 3 of 3)"),
        (None, 3, "got no verdict from {url}: RemoteProtocolError "),
        ((404, b"no such page"), 1, "was refused by {url} with 404: no such page"),
        ((302, b""), 1, "was refused by {url} with 302: (nothing)"),
        ((200, b"fine"), 1, 'got no {"reward": number}, with "answer": text or without, from {url}: fine'),
        ((200, b'{"score": 1}'), 1, "got no "),
        ((200, b'{"reward": "1"}'), 1, "got no "),
        ((200, b'{"reward": null}'), 1, "got no "),
        ((200, b'{"reward": NaN}'), 1, "got no "),
        ((200, b'{"reward": 1' + b"0" * 400 + b"}"), 1, "got no "),
        ((200, b'{"reward": 1, "answer": 5}'), 1, "got no "),
        ((200, b"[1]"), 1, "got no "),
        ((200, b'{"reward": -1e308}'), 1, "returned -1e+308 instead of "),
        ((200, b'{"reward": 1, "why": "' + b"x" * 2**21 + b'"}'), 1, "got more than 1048576 bytes from "),
        ((200, b"[" * 100_000), 1, "got no "),
        ((200, b"\xff\xfe"), 1, "got no "),
    ],
)
def test_no_verdict_is_a_failure_and_never_0(
    verifier: Verifier, reply: Reply, attempts: int, problem: str
) -> None:
    verifier.reply = lambda asked, number: reply
    with make(verifier, retries=2) as grader:
        found = ask(grader).result(timeout=20)
    assert isinstance(found, Failure)
    assert found.problem.startswith(problem.replace("{url}", verifier.url)), found.problem
    assert found.prompt.index == 3 and len(found.problem) < 500 and "\n" not in found.problem
    assert len(verifier.asked) == attempts


def test_a_verifier_that_is_not_there_or_does_not_answer(verifier: Verifier) -> None:
    verifier.reply = lambda asked, number: time.sleep(1.0)  # type: ignore[func-returns-value]
    with make(verifier, retries=1, seconds=0.3) as grader:
        found = ask(grader).result(timeout=20)
    assert isinstance(found, Failure)
    assert found.problem.endswith("no answer in 0.3 s (reward.seconds) (attempt 2 of 2)")
    with make(verifier, retries=1, url="http://127.0.0.1:9/") as grader:
        found = ask(grader).result(timeout=20)
    assert isinstance(found, Failure) and "ConnectError" in found.problem


def test_fields_that_are_no_json(verifier: Verifier) -> None:
    with make(verifier) as grader:
        for bad in ({1, 2}, float("nan")):
            found = ask(grader, level=bad).result(timeout=20)
            assert isinstance(found, Failure) and "fields are no JSON" in found.problem
    assert verifier.asked == []


def test_concurrency_bounds_the_requests(verifier: Verifier) -> None:
    def slow(asked: dict[str, Any], number: int) -> Reply:
        time.sleep(0.05)
        return 200, b'{"reward": 0}'

    verifier.reply = slow
    with make(verifier, concurrency=4) as grader:
        found = [future.result(timeout=20) for future in [ask(grader) for _ in range(40)]]
    assert found == [Grade(reward=0.0, score=0.0, answer=None)] * 40
    assert 2 <= verifier.most <= 4


def test_as_a_further_reward(verifier: Verifier) -> None:
    with make(verifier, name="exact_match", also={"http": 0.5}) as grader:
        assert ask(grader, "5").result(timeout=20) == Grade(
            reward=1.5, score=1.0, answer="5", parts={"http": 1.0}
        )


def test_closing_while_it_is_asked(verifier: Verifier) -> None:
    verifier.reply = lambda asked, number: time.sleep(0.5)  # type: ignore[func-returns-value]
    grader = make(verifier)
    futures = [ask(grader) for _ in range(5)]
    time.sleep(0.1)
    grader.close()
    assert all(future.cancelled() for future in futures)
