"""A small HTTP server that answers like vLLM, and fails on demand. It runs in the loop of the test."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial, wraps
from inspect import Signature, signature
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from megatron_fspo.job.remote import http_client
from megatron_fspo.rollout.checksum import checksum
from megatron_fspo.rollout.client.pool import CompletionRequest, Pool
from megatron_fspo.rollout.client.server import Server
from megatron_fspo.types import Completion, Prompt, SamplingParams

MAX_TOKENS = 3
VOCAB_SIZE = 50
PARAMS = SamplingParams(max_tokens=MAX_TOKENS)
KEY = "sk-very-secret-1"
UPDATE = (
    "/pause?mode=keep",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache?reset_running_requests=true",
    "/resume",
)
"""The routes of a weight update with their parameters, in order."""


def requests(count: int) -> list[CompletionRequest]:
    """Requests that their seeds tell apart, and so their answers."""
    prompt = Prompt(index=0, token_ids=(1, 2), text="", answer="")
    return [CompletionRequest(prompt=prompt, params=PARAMS, seed=seed) for seed in range(count)]


def tokens_of(seed: int) -> tuple[int, ...]:
    """What the server samples for a seed."""
    return tuple(seed // VOCAB_SIZE**i % VOCAB_SIZE for i in range(MAX_TOKENS))


def good_answer(seed: int, version: str = "default") -> dict[str, Any]:
    tokens = tokens_of(seed)
    return {
        "request_id": "r",
        "model": "policy",
        "usage": {},
        "prompt_logprobs": None,
        "choices": [
            {
                "index": 0,
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": list(tokens),
                "weight_versions": [{"version": version, "start": 0, "end": len(tokens)}],
                "logprobs": {
                    "content": [
                        {"token_id": token, "logprob": -0.5 - i, "rank": 1, "top_logprobs": []}
                        for i, token in enumerate(tokens)
                    ]
                },
            }
        ],
    }


def check_all(completions: list[Completion], count: int) -> None:
    """As many as asked for, each where its request was."""
    assert [tuple(completion.token_ids) for completion in completions] == [tokens_of(i) for i in range(count)]


class FakeServer:
    """Answers ``/health``, what an update asks for, and everything else as a generate request.

    ``script`` says what happens to the next requests, ``always`` to those after: "answer", "hang" (never
    answer), "cut" (half of the JSON, as if it were all), "drop" (half of the body, then the connection is
    gone), "close" (no answer at all), "garbage" (an answer without tokens), "die" (the whole server is gone),
    or a status with which to refuse.
    """

    def __init__(self) -> None:
        self.script: deque[str | int] = deque()
        self.always: str | int = "answer"
        self.healthy = True
        self.delay = 0.0
        self.version = "default"
        self.port = 0
        self.arrived: list[int] = []  # seeds, in order
        self.answered: list[int] = []
        self.headers: list[str] = []
        self.bodies: list[Any] = []
        self.open = 0
        self.most_open = 0
        self.said = "no"
        self.broken: set[str] = set()  # routes of updates and memory phases that fail
        self.once = ""  # the one that fails the next time
        self.fatal: set[str] = set()  # those that it does not survive
        self.updates: list[str] = []  # routes of updates, in order
        self.answers: dict[str, object] = {}  # route → what it answers instead
        self.weights: dict[str, Tensor] = {}  # as they came through files
        self.keeps: set[str] = set()  # tensors that it does not take
        self.key = ""  # that it asks for, on every route but health
        self.score = -1.0  # log-prob of every prompt token
        self.last = 0.0  # added to that of the last one
        self.serving = asyncio.Event()  # not while paused
        self.serving.set()
        self.updating = False
        self.awake = {"weights", "kv_cache"}  # what it has in memory
        self.memory: Callable[[set[str]], None] = lambda awake: None  # hears of every change
        self._server: asyncio.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._handlers: set[asyncio.Task[Any]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """On the port it had before, if it ran before."""
        self._loop = asyncio.get_running_loop()
        # Known to kill() before it listens, also when the wait for that is cancelled.
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, start_serving=False)
        self.port = self._server.sockets[0].getsockname()[1]
        await self._server.start_serving()

    def start_from_outside(self) -> None:
        """Like :meth:`start`, from another thread."""
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self.start(), self._loop).result(5)

    def kill_from_outside(self) -> None:
        """Like :meth:`kill`, from another thread."""

        async def kill() -> None:
            self.kill()

        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(kill(), self._loop).result(5)

    def kill(self) -> None:
        """Like kill −9: nobody listens, and open connections are reset."""
        if self._server is not None:
            loop = asyncio.get_running_loop()
            # asyncio loses a connection, still open, that it has accepted but not yet handed over when the
            # server closes: its client would wait for ever. So accept no more, and close after the hand-over.
            for listening in self._server.sockets:
                loop.remove_reader(listening)
            loop.call_soon(self._server.close)
            self._server = None
            self.memory(set())
        for writer in self._writers:
            writer.transport.abort()
        for handler in self._handlers - {asyncio.current_task()}:
            handler.cancel()

    async def __aenter__(self) -> FakeServer:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.kill()
        await asyncio.to_thread(time.sleep, 0.01)  # some tests replace asyncio's sleep
        self.kill()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._server is None:  # killed while this connection was accepted
            writer.transport.abort()
            return
        self._writers.add(writer)
        self._handlers.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            self._handlers.discard(task)
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; whether the connection lives on."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.headers.append(head)
        lengths = [line.split(":")[1] for line in head.split("\r\n") if line.lower().startswith("content-le")]
        body = await reader.readexactly(int(lengths[0])) if lengths else b""
        if head.startswith("GET /health"):
            return await self._send(writer, 200 if self.healthy else 503, b"")
        if self.key and f"authorization: bearer {self.key}\r\n" not in head.lower():
            return await self._send(writer, 401, b'{"error": {"message": "no key, or another"}}')
        request = json.loads(body) if body else {}
        route = head.split()[1]
        if route in self.answers:
            return await self._send(writer, 200, json.dumps(self.answers[route]).encode())
        if route in self.fatal:
            self.kill()
            return False
        if route in {*self.broken, self.once}:
            self.once = ""
            return await self._send(writer, 500, b"broken")
        if route == "/collective_rpc":
            told = {name: checksum(tensor).to_words() for name, tensor in self.weights.items()}
            return await self._send(writer, 200, json.dumps({"results": [told]}).encode())
        if route.split("?")[0] in ("/sleep", "/wake_up", "/is_sleeping"):
            return await self._sleep_or_wake(writer, route)
        if route in UPDATE:
            return await self._update(writer, route, request)
        self.bodies.append(request)
        seed = request.get("sampling_params", {}).get("seed", -1)
        self.arrived.append(seed)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await asyncio.sleep(self.delay)
            started = self.version
            if route.endswith("generate"):
                await self.serving.wait()
                assert len(self.awake) == 2
            if "prompt_logprobs" in request.get("sampling_params", {}):
                return await self._score(writer, request["token_ids"])
            return await self._act(writer, seed, started)
        finally:
            self.open -= 1

    async def _sleep_or_wake(self, writer: asyncio.StreamWriter, route: str) -> bool:
        """As vLLM does with ``--enable-sleep-mode``."""
        if route == "/is_sleeping":
            asleep = not self.serving.is_set() or len(self.awake) < 2
            return await self._send(writer, 200, json.dumps({"is_sleeping": asleep}).encode())
        self.updates.append(route)
        if route.startswith("/sleep"):
            self.serving.clear()
            self.awake = set()
        else:
            self.awake |= {"weights"} if route == "/wake_up?tags=weights" else {"weights", "kv_cache"}
            if len(self.awake) == 2:
                self.serving.set()
        self.memory(self.awake)
        return await self._send(writer, 200, b"{}")

    async def _update(self, writer: asyncio.StreamWriter, route: str, request: Any) -> bool:
        self.updates.append(route)
        # Without its memory a GPU's worker dies of such.
        if "weights" not in self.awake or (route == "/resume" and len(self.awake) < 2):
            self.kill()
        if route.startswith("/pause"):
            self.serving.clear()
        if route == "/resume":
            self.serving.set()
        if route == "/start_weight_update":
            if self.updating:
                return await self._send(writer, 500, b"in the middle of an update")
            self.updating = True
        if route == "/update_weights":
            for path in request["update_info"]["paths"]:
                new = load_file(path)
                self.weights |= {name: new[name] for name in new.keys() - self.keeps}
        if route == "/finish_weight_update":
            self.updating = False
            self.version = request.get("weight_version", self.version)
        return await self._send(writer, 200, b'{"success": true}')

    async def _score(self, writer: asyncio.StreamWriter, ids: list[int]) -> bool:
        answer = good_answer(0, self.version)
        entries = [{str(token): {"logprob": self.score}} for token in ids[1:]]
        entries[-1][str(ids[-1])]["logprob"] += self.last
        return await self._send(
            writer, 200, json.dumps(answer | {"prompt_logprobs": [None, *entries]}).encode()
        )

    async def _act(self, writer: asyncio.StreamWriter, seed: int, started: str) -> bool:
        what = self.script.popleft() if self.script else self.always
        whole = good_answer(max(seed, 0), self.version)
        if started != self.version:  # an update met it after its first token
            spans = [{"version": started, "start": 0, "end": 1}]
            spans += [{"version": self.version, "start": 1, "end": MAX_TOKENS}]
            whole["choices"][0]["weight_versions"] = spans
        answer = json.dumps(whole).encode()
        if isinstance(what, int):
            error = {"error": {"message": self.said, "code": what}}
            return await self._send(writer, what, json.dumps(error).encode())
        if what == "answer":
            self.answered.append(seed)
            return await self._send(writer, 200, answer)
        if what == "cut":
            return await self._send(writer, 200, answer[: len(answer) // 2])
        if what == "garbage":
            return await self._send(writer, 200, b'{"model": "policy", "choices": []}')
        if what == "hang":
            await asyncio.Event().wait()
        if what == "drop":
            await self._send(writer, 200, answer[: len(answer) // 2], length=len(answer))
        if what == "die":
            self.kill()
        return False

    async def _send(
        self, writer: asyncio.StreamWriter, status: int, body: bytes, length: int | None = None
    ) -> bool:
        length = len(body) if length is None else length
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {length}\r\n\r\n".encode() + body)
        await writer.drain()
        return True


def run(work: Callable[[Pool, list[FakeServer]], Awaitable[Any]], count: int = 2, **options: Any) -> Any:
    """Do what is wanted with servers and a pool of them."""
    settings = {"max_in_flight_per_server": 4, "vocab_size": VOCAB_SIZE, "probe_seconds": 0.01} | options

    async def main() -> Any:
        async with AsyncExitStack() as stack:
            fakes = [await stack.enter_async_context(FakeServer()) for _ in range(count)]
            http = await stack.enter_async_context(http_client())
            pool = Pool([Server(fake.url, http, api_key=KEY) for fake in fakes], **settings)
            async with asyncio.timeout(20):
                return await work(pool, fakes)

    return asyncio.run(main())


def with_servers(count: int = 2, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test of a coroutine ``(pool, fakes, …)``: see :func:`run`."""

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        @wraps(test)
        def call(**arguments: Any) -> None:
            run(partial(test, **arguments), count, **options)

        # pytest passes what is named here.
        call.__signature__ = Signature(list(signature(test).parameters.values())[2:])  # type: ignore[attr-defined]
        return call

    return decorate


def with_server(test: Callable[..., Any]) -> Callable[..., None]:
    """Make a test of a coroutine ``(server, fake, …)``."""

    @wraps(test)
    async def with_first(pool: Pool, fakes: list[FakeServer], **arguments: Any) -> None:
        await test(pool.live()[0], fakes[0], **arguments)

    return with_servers(1)(with_first)
