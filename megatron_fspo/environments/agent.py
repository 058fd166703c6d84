"""``environment.name = "agent"``: any program that talks to an OpenAI-compatible endpoint.

Each trajectory has its own process of the program, started after its first turn, and its own API key for a
server in this process, which answers chat completions with the policy's turns. Messages that the program adds
before its next request are inserted as tokens. A conversation that it rewrites begins a new row. The policy's
tokens stay as sampled.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty, SimpleQueue
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize

from megatron_fspo.environments.chat import Encoder, Message, added, render
from megatron_fspo.errors import InputError
from megatron_fspo.job.parent import clean_environment, has_ended, kill_group, kill_marked
from megatron_fspo.rewards.grade import LARGEST
from megatron_fspo.types import Prompt, Reply

if TYPE_CHECKING:
    from megatron_fspo.config.environment import Environment

_LARGEST = 2**24
"""Maximum bytes of a request."""
_PIPE, _TAIL = 2**20, 2**12
"""Bytes that a pipe may hold, and that are kept of the program's output."""
_LOOK_SECONDS = 0.1
_EXIT_SECONDS = 30.0


class _Wrong(Exception):
    """The program, or one of its requests, is invalid."""


@dataclass(frozen=True)
class _Request:
    """A chat completion that the program waits for."""

    messages: list[Message]
    answer: SimpleQueue[str] = field(default_factory=SimpleQueue)


class _Session:
    """The program's process for one trajectory."""

    def __init__(self, command: Sequence[str], prompt: Prompt, env: Mapping[str, str]) -> None:
        self.secret = secrets.token_urlsafe()
        self.requests: SimpleQueue[_Request | None] = SimpleQueue()
        """None: the program has ended."""
        self.open: _Request | None = None
        """The last request, which waits for the current turn."""
        self.asking = threading.Lock()
        """Held while a request waits for its answer."""
        self.over, self.ended = threading.Event(), threading.Event()
        """The program must end; it has ended, with its child processes."""
        self.reward: float | None = None
        self.failed = True
        row = {"index": prompt.index, "prompt": prompt.text, "answer": prompt.answer}
        task = json.dumps({**row, "fields": dict(prompt.fields)}).encode()
        run = partial(self._run, command, task, {**env, "OPENAI_API_KEY": self.secret})
        threading.Thread(target=run, name="agent", daemon=True).start()

    def _run(self, command: Sequence[str], task: bytes, env: dict[str, str]) -> None:
        """Run the program. The last word of its output may be a reward."""
        try:
            with TemporaryFile() as stdin:  # a program may not read it, and a pipe would be full
                stdin.write(task)
                stdin.seek(0)
                process = subprocess.Popen(
                    command,
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    env=env,
                    start_new_session=True,
                )
            assert process.stdout is not None
            with process.stdout as pipe:
                end = self._output(process, pipe.fileno())
            self.failed = process.wait(_EXIT_SECONDS) != 0
            with suppress(ValueError, IndexError):
                reward = float(end.decode("utf-8", "replace").split()[-1])
                self.reward = reward if abs(reward) <= LARGEST else None
        finally:
            self.ended.set()
            self.requests.put(None)

    def _output(self, process: subprocess.Popen[bytes], pipe: int) -> bytes:
        """Return the end of the program's output when it has ended, or was killed as it must end."""
        last, end, ready = False, b"", select.poll()
        ready.register(pipe, select.POLLIN)
        while not last:
            # Its children may hold the pipe open, so its end, not the pipe's, ends the reading.
            last = has_ended(process) or self.over.is_set()
            if ready.poll(0 if last else _LOOK_SECONDS * 1000):
                chunk = os.read(pipe, _PIPE)
                end = (end + chunk)[-_TAIL:]
                if not chunk and not last:  # the program has closed it
                    self.over.wait(_LOOK_SECONDS)
        kill_group(process)
        kill_marked(f"OPENAI_API_KEY={self.secret}")  # children in sessions of their own
        return end


class AgentEnvironment:
    """A :class:`~megatron_fspo.types.Environment` that runs one program per trajectory.

    The program is killed if it takes longer than ``environment.seconds`` until its next request or its end,
    and when the trajectory is garbage-collected. Raises ``InputError`` if the model has no chat template, the
    program does not exist, or a variable is not set.
    """

    def __init__(self, config: Environment, tokenizer: Any, stop_token_ids: Sequence[int]) -> None:
        if not tokenizer.chat_template:
            raise InputError("environment.name = agent needs a model with a chat template")
        if shutil.which(config.command[0]) is None:
            raise InputError(f"environment.command: there is no program {config.command[0]!r}")
        self._config, self._tokenizer = config, tokenizer
        self.limit_seconds = 2 * config.seconds + 60.0
        self._variables = clean_environment(config.variables)
        self._encoder = Encoder(tokenizer, stop_token_ids)
        self._sessions: WeakKeyDictionary[Any, _Session] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._server: _Server | None = None

    def answer(self, prompt: Prompt, turns: Sequence[Sequence[int]], trajectory: object) -> Future[Reply]:
        """See the protocol."""
        result: Future[Reply] = Future()

        def work() -> None:
            began, session = time.monotonic(), None
            try:
                session = self._session(prompt, trajectory)
                reply = self._reply(session, prompt, turns[-1])
            except Exception as error:  # including errors of the chat template, or at the program's start
                said = str(error) if isinstance(error, _Wrong) else f"failed: {type(error).__name__} {error}"
                print(
                    f"megatron-fspo: the agent of prompt {prompt.index} {said}", file=sys.stderr, flush=True
                )
                if session is not None:
                    session.over.set()
                reply = Reply(failed=True)
            with suppress(InvalidStateError):  # cancelled meanwhile
                result.set_result(replace(reply, seconds=time.monotonic() - began))

        threading.Thread(target=work, name="agent answer", daemon=True).start()
        return result

    def _session(self, prompt: Prompt, trajectory: object) -> _Session:
        with self._lock:
            if self._server is None:
                self._server = _Server()
            if trajectory not in self._sessions:
                env = {**self._variables, "OPENAI_BASE_URL": self._server.address}
                session = _Session(self._config.command, prompt, env)
                self._server.sessions[session.secret] = session
                self._sessions[trajectory] = session
                finalize(trajectory, self._server.forget, session.secret).atexit = False
            return self._sessions[trajectory]

    def _reply(self, session: _Session, prompt: Prompt, turn: Sequence[int]) -> Reply:
        request = session.open
        if request is None:
            if (request := self._next(session)) is None:
                raise _Wrong("ended without a request to the model")
            if "".join(render(self._tokenizer, request.messages)) != prompt.text:
                raise _Wrong("sent a first request that differs from the data's prompt")
        said = self._encoder.text(turn)
        request.answer.put(said)
        session.open = self._next(session)
        if session.open is None:
            return Reply(reward=session.reward, failed=session.failed)
        messages, most = session.open.messages, self._config.inserted_tokens
        known = [*request.messages, {"role": "assistant", "content": said}]
        if messages[: len(known)] == known and len(messages) > len(known):
            parts = added(self._tokenizer, request.messages, messages[len(known) :])
            if parts is not None:
                ended = self._encoder.ended(turn)
                return Reply(token_ids=self._encoder.tokens(parts, most=most, ended=ended))
        context = self._encoder.tokens(render(self._tokenizer, messages), most=most)
        return Reply(token_ids=context, restarts=True)

    def _next(self, session: _Session) -> _Request | None:
        try:
            return session.requests.get(timeout=self._config.seconds)
        except Empty:
            raise _Wrong(f"took longer than {self._config.seconds:g} s (environment.seconds)") from None


class _Server(ThreadingHTTPServer):
    """Answers the programs on this machine. The key in a request identifies the session."""

    daemon_threads, request_queue_size = True, 128  # programs connect at once

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.sessions: dict[str, _Session] = {}
        self.address = f"http://127.0.0.1:{self.server_address[1]}/v1"
        guard = (
            f"import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); sys.path[:] = {sys.path!r}; "
            "from megatron_fspo.job.parent import kill_marked; sys.stdin.read(); "
            f"kill_marked('OPENAI_BASE_URL={self.address}')"
        )
        # The kernel closes its stdin when this process ends, even by kill -9. Then it ends what is left.
        command = [sys.executable, "-IS", "-c", guard]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        threading.Thread(target=self.serve_forever, name="agents", daemon=True).start()
        atexit.register(self._end)

    def forget(self, secret: str) -> None:
        """End the session of a trajectory that is over."""
        self.sessions.pop(secret).over.set()

    def _end(self) -> None:
        sessions = list(self.sessions.values())
        for session in sessions:
            session.over.set()
        for session in sessions:
            session.ended.wait(_EXIT_SECONDS)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 60.0
    """Seconds for a read or write of a connection."""

    def do_POST(self) -> None:
        """Answer a chat completion, the only supported request."""
        session = self.server.sessions.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        if session is None:
            self._send(401, {"error": {"message": "no running trajectory has this key"}})
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > 9 or int(length) > _LARGEST:
            self.close_connection = True
            self._send(400, {"error": {"message": f"Content-Length: must be at most {_LARGEST} bytes"}})
            return
        try:
            body = self.rfile.read(int(length))
            if self.path != "/v1/chat/completions":
                raise _Wrong(f"{self.path} is not supported: use /v1/chat/completions")
            request = _Request(_messages(json.loads(body)))
        except (ValueError, RecursionError, _Wrong) as error:
            self._send(400, {"error": {"message": str(error)}})
            return
        if not session.asking.acquire(blocking=False):
            self._send(
                429, {"error": {"message": "another request waits for its answer: send one at a time"}}
            )
            return
        text = None
        try:
            session.requests.put(request)
            while text is None and not session.ended.is_set():
                with suppress(Empty):
                    text = request.answer.get(timeout=_LOOK_SECONDS)
        finally:
            session.asking.release()
        if text is None:
            self._send(410, {"error": {"message": "the trajectory is over"}})
            return
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        head = {"id": session.secret[:8], "object": "chat.completion", "created": int(time.time())}
        self._send(200, {**head, "model": "policy", "choices": [choice], "usage": usage})

    def _send(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        with suppress(ConnectionError):  # the program has ended
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def _messages(body: Any) -> list[Message]:
    """Return the conversation of a request. Raises :class:`_Wrong` if it is invalid or not supported."""
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise _Wrong("messages: must be a list with at least one message")
    for key in ("stream", "tools", "functions"):
        if body.get(key):
            raise _Wrong(f"{key}: not supported; write tool calls and their results as text of messages")
    if body.get("n", 1) not in (1, None):
        raise _Wrong("n: must be 1")
    return [_message(message) for message in body["messages"]]


def _message(message: Any) -> Message:
    role, content = (message.get(key) if isinstance(message, dict) else None for key in ("role", "content"))
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise _Wrong("messages: each must have a role, and text as its content")
    return {"role": role, "content": content}
