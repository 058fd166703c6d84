"""``megatron-fspo serve``, running, and a program in place of ``vllm``.

The latter records how it was called, starts a child, and answers /health, other routes with 401 if it was
told of a guard, else 404.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from launch import environment

_PROGRAM = """\
#!{python} -IS
import http.server, json, os, signal, subprocess, sys
argv, folder, mode = sys.argv[1:], {folder!r}, open({folder!r} + "/mode").read()
if mode == "crash":
    print("loading\\nRuntimeError: no room for the weights", flush=True)
    sys.exit(3)
if mode == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
with open(folder + "/starts", "a") as file:
    pids = [os.getpid(), child.pid]
    file.write(json.dumps(dict(argv=argv, environ=dict(os.environ), pids=pids)) + "\\n")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        other = 401 if "--middleware" in argv and mode != "open" else 404
        self.send_response(200 if self.path == "/health" else other)
        self.end_headers()
address = argv[argv.index("--host") + 1], int(argv[argv.index("--port") + 1])
if mode != "slow":
    http.server.HTTPServer(address, Handler).serve_forever()
signal.pause()
"""
_PYTHON = "#!/bin/sh\necho '{answer}'\n"


@dataclass(frozen=True)
class FakeVLLM:
    folder: Path

    @property
    def program(self) -> Path:
        return self.folder / "vllm"

    def write(self, *, plugin: bool = True, nccl: str | None = None) -> None:
        answer = json.dumps({"version": "0.32.0+cpu", "plugin": plugin, "nccl": nccl})
        programs = {
            "vllm": _PROGRAM.format(python=sys.executable, folder=str(self.folder)),
            "python": _PYTHON.format(answer=answer),
        }
        for name, text in programs.items():
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o755)
        self.set_mode("serve")

    def set_mode(self, mode: str) -> None:
        """``serve``, ``slow`` (never ready), ``deaf`` (to SIGTERM), ``open`` (asks nobody for the key) or
        ``crash``, from the next start on."""
        (self.folder / "mode").write_text(mode)

    @property
    def starts(self) -> list[dict]:
        """``argv``, ``environ`` and ``pids`` (its own and its child's) of every start."""
        path = self.folder / "starts"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def running(self) -> list[int]:
        return [pid for start in self.starts for pid in start["pids"] if is_running(pid)]


class Serve:
    """One ``megatron-fspo serve``.

    Args:
        model: folder of the checkpoint.
        log: of vLLM; what the command itself says goes to a file beside it.
        words: more of the command line.
        as_child: of a program that knows nothing of it.
    """

    def __init__(self, model: Path, log: Path, *words: str, as_child: bool = False) -> None:
        self.port, self.log, self.out = free_port(), log, log.with_suffix(".out")
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "megatron_fspo", "serve", "--model", str(model)]
        command += ["--port", str(self.port), "--log", str(log), *words]
        if as_child:
            command = [sys.executable, "-c", f"import subprocess; subprocess.run({command})"]
        # By itself every server binds its worker to the first core, where they would be in the way.
        env = environment(VLLM_CPU_OMP_THREADS_BIND="nobind")
        with self.out.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env)

    @property
    def said(self) -> list[str]:
        return self.out.read_text().splitlines()

    @property
    def starts(self) -> int:
        """How often it was ready, the restarts included."""
        return sum(line.startswith("vLLM is ready") for line in self.said)

    def until_ready(self, starts: int = 1) -> None:
        until(
            lambda: self.starts >= starts or self.process.poll() is not None, f"start {starts}", seconds=300
        )
        assert self.starts >= starts, "\n".join(self.said) + self.log.read_text(errors="replace")[-3000:]

    @property
    def family(self) -> list[psutil.Process]:
        """The processes that it started, and they."""
        alive = is_running(self.process.pid)
        return psutil.Process(self.process.pid).children(recursive=True) if alive else []


def free_port(count: int = 1) -> int:
    """The first of so many in a row."""
    while True:
        with ExitStack() as stack:
            probes = [stack.enter_context(socket.socket()) for _ in range(count)]
            probes[0].bind(("127.0.0.1", 0))
            first: int = probes[0].getsockname()[1]
            with suppress(OSError):
                for number, probe in enumerate(probes[1:], 1):
                    probe.bind(("127.0.0.1", first + number))
                return first


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.05)
