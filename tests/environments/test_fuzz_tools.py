"""200 tool servers and agents that misbehave at random: each has one counted outcome, and nothing is left."""

from __future__ import annotations

import gc
import gzip
import json
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_fspo.config.environment import Environment
from megatron_fspo.environments.agent import AgentEnvironment
from megatron_fspo.environments.text import TextEnvironment
from megatron_fspo.types import Prompt, Reply
from test_agent import QUESTION, running
from test_text import END, TOKENIZER, ids

SECONDS = 0.6
"""For an answer that will not come; a good one has a minute, also on a busy machine."""
GOOD = {'"so"': Reply(token_ids=tuple(ids("so"))), "0.25": Reply(reward=0.25), "null": Reply()}
WRONG = [
    *("true", "[1]", "NaN", "1e999", "-Infinity", "1" + "0" * 400, "9" * 6000, "[" * 50_000, '{"text": 5}'),
    *('{"text": "t", "failed": "yes"}', '{"text": "t", "failed": 1000000}', '{"text": "t", "forget": null}'),
    *('{"reward": "1"}', '{"reward": true}', '{"reward": 1e999}', '{"text": "go on", "reward": 5}', "{", ""),
    *('{"text": "t", "nope": 1}', '{"": 1}', "so", '"\\', "\x00", '{"failed": {}}'),
]
BEHAVIOURS = {
    **dict.fromkeys(
        ["drip", "drip of headers", "silence", "flood", "flood of headers", "gzip", "half"], False
    ),
    **dict.fromkeys(["redirect", "status", "reset", "closed", "no http"], False),
    **{f"wrong {number}": False for number in range(len(WRONG))},
    **{f"good {said}": True for said in GOOD},
    "half character": True,
}


class Hostile(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 20

    def do_POST(self) -> None:
        how = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["answer"]
        end = time.monotonic() + 20 * SECONDS
        try:
            self.behave(how, end)
        except OSError:  # the client has hung up
            self.close_connection = True

    def behave(self, how: str, end: float) -> None:
        write = self.wfile.write
        if how == "silence":
            time.sleep(2 * SECONDS)
        elif how == "drip":
            self.head(length=10**6)
            while time.monotonic() < end:
                write(b" ")
                time.sleep(SECONDS / 3)
        elif how == "drip of headers":
            write(b"HTTP/1.1 200 OK\r\n")
            while time.monotonic() < end:
                write(b"X-A: b\r\n")
                time.sleep(SECONDS / 3)
        elif how == "flood":
            self.head(length=2**30)
            for _ in range(2**10):
                write(b'"' * 2**20)
        elif how == "flood of headers":
            write(b"HTTP/1.1 200 OK\r\n" + b"X-A: " + b"b" * 2**22)
        elif how == "gzip":
            self.say(gzip.compress(b'"' + b"a" * 2**26 + b'"'), Content_Encoding="gzip")
        elif how == "half":
            self.head(length=100)
            write(b'"half of it')
            self.close_connection = True
        elif how == "redirect":
            self.head(307, 0, Location=f"http://127.0.0.1:{self.server.server_address[1]}/elsewhere")
        elif how == "status":
            self.head(random.choice([201, 204, 301, 400, 403, 404, 429, 500, 503]), 0)
        elif how == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        elif how == "closed":
            self.close_connection = True
        elif how == "no http":
            write(random.randbytes(3000))
            self.close_connection = True
        elif how == "half character":
            self.say(b'"a\\ud800b"')
        else:
            word, _, what = how.partition(" ")
            self.say((WRONG[int(what)] if word == "wrong" else what).encode())

    def say(self, body: bytes, **more: str) -> None:
        self.head(length=len(body), **more)
        self.wfile.write(body)

    def head(self, status: int = 200, length: int | None = None, **more: str) -> None:
        self.send_response(status)
        for key, value in more.items():
            self.send_header(key.replace("_", "-"), value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()


# With their Python's site-packages it takes a second longer to start.
ASK = "import json,os,subprocess,sys,time;from urllib.request import *\n" + (
    "said={'messages':[{'role':'user','content':'2 + 2?'}]}\n"
    "key={'Authorization':'Bearer '+os.environ['OPENAI_API_KEY']}\n"
    "url=os.environ['OPENAI_BASE_URL']+'/chat/completions'\n"
    "ask=lambda:urlopen(Request(url,json.dumps(said).encode(),key))\n"
)
SLOW = ("time.sleep(99)", "while True:")
"""Agents that do not end by themselves: they have 4 seconds, others a minute."""
AGENTS = {
    "ask();print(0.25)": Reply(reward=0.25),
    "ask();subprocess.Popen(['sleep','863.5'],start_new_session=True);print(0.25)": Reply(reward=0.25),
    "ask();subprocess.Popen(['sleep','863.5']);print('none')": Reply(),
    "ask();sys.stdout.write('y '*10**7+'0.25')": Reply(reward=0.25),
    "ask();sys.stdout.buffer.write(b'\\xff\\xfe 0.25')": Reply(reward=0.25),
    "ask();print('nan')": Reply(),
    "ask();sys.exit(3)": Reply(failed=True),
    "ask();os.kill(os.getpid(),9)": Reply(failed=True),
    "ask();time.sleep(99)": Reply(failed=True),
    "ask();os.close(1);time.sleep(99)": Reply(failed=True),
    "sys.exit(0)": Reply(failed=True),
    "\nwhile True: sys.stdout.write('y'*10**6)": Reply(failed=True),
    "subprocess.Popen(['sleep','863.5'],start_new_session=True);time.sleep(99)": Reply(failed=True),
}


class Trajectory:
    """What the environment binds a program to."""


def asked(how: str, environment: Any, text: str = "?") -> tuple[str, Trajectory, Future[Reply]]:
    prompt, trajectory = Prompt(index=3, token_ids=(1,), text=text, answer=how), Trajectory()
    return how, trajectory, environment.answer(prompt, [[*ids("four"), END]], trajectory)


def resources() -> tuple[int, int, int]:
    """Threads, descriptors and MiB of this process."""
    process = psutil.Process()
    return process.num_threads(), process.num_fds(), process.memory_info().rss >> 20


def flat(before: tuple[int, int, int]) -> None:
    """Wait until the process has no more than before, and up to 64 MiB."""
    end = time.monotonic() + 60
    while True:
        gc.collect()
        now = resources()
        if now[0] <= before[0] + 1 and now[1] <= before[1] + 2 and now[2] < before[2] + 64:
            return
        assert time.monotonic() < end, f"threads, descriptors, MiB: {before} before, {now} after"
        time.sleep(0.2)


@pytest.mark.slow
def test_150_answers_of_tool_servers(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_fspo.job.remote._FIRST_WAIT", 0.01)
    bad, good = (
        TextEnvironment(Environment(name="http", url=server, seconds=seconds), TOKENIZER, [END])
        for seconds in (SECONDS, 60.0)
    )
    for environment in (good, bad):
        asked("good null", environment)[2].result(60)
    before, chance = resources(), random.Random(5)
    cases = [*BEHAVIOURS, *chance.choices([*BEHAVIOURS], k=150 - len(BEHAVIOURS))]
    chance.shuffle(cases)
    answers = [asked(how, good if BEHAVIOURS[how] else bad) for how in cases]
    _, late = wait([future for *_, future in answers], timeout=300)
    assert not late, [how for how, _, future in answers if future in late]
    for how, _, future in answers:
        reply = future.result()
        assert reply.failed is not BEHAVIOURS[how], (how, reply)
        assert reply.token_ids is None or len(reply.token_ids) <= 512
        word, _, said = how.partition(" ")
        if word == "good":
            assert reply == GOOD[said]
    flat(before)


@pytest.mark.slow
def test_50_agents(tmp_path: Path) -> None:
    text = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, tokenize=False
    )
    programs = {}
    for number, (what, reply) in enumerate(AGENTS.items()):
        (tmp_path / f"{number}.py").write_text(ASK + what)
        command = (sys.executable, "-S", str(tmp_path / f"{number}.py"))
        seconds = 4.0 if any(word in what for word in SLOW) else 60.0
        config = Environment(name="agent", command=command, seconds=seconds)
        programs[what] = AgentEnvironment(config, TOKENIZER, [END]), reply
    for environment, _ in programs.values():  # its server's thread and socket stay
        environment._server = next(iter(programs.values()))[0]._server
    first = programs[next(iter(AGENTS))]
    assert asked(next(iter(AGENTS)), first[0], text)[2].result(120) == first[1]
    for environment, _ in programs.values():
        environment._server = first[0]._server
    before, chance = resources(), random.Random(6)
    cases = [*AGENTS, *chance.choices([*AGENTS], k=50 - len(AGENTS))]
    answers = [asked(what, programs[what][0], text) for what in cases]
    done, late = wait([future for *_, future in answers], timeout=300)
    assert not late, [what for what, _, future in answers if future in late]
    for what, _, future in answers:
        assert future.result() == programs[what][1], what
    del answers, done, future
    flat(before)
    psutil.wait_procs(running("863.5"), timeout=20)
    assert not running("863.5")
