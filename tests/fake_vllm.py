"""A program in place of ``vllm``: it records how it was called, starts a child, and answers /health, other
routes with 401 if it was told of a guard, else 404."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

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

    def write(self, *, version: str = "0.32.0+cpu", plugin: bool = True, mode: str = "serve") -> None:
        answer = json.dumps({"version": version, "plugin": plugin})
        programs = {
            "vllm": _PROGRAM.format(python=sys.executable, folder=str(self.folder)),
            "python": _PYTHON.format(answer=answer),
        }
        for name, text in programs.items():
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o755)
        self.set_mode(mode)

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
