"""One vLLM server as a child process: start, health check, stop."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.rollout.common import api_key, is_loopback
from megatron_fspo.rollout.server import guard
from megatron_fspo.rollout.server.flags import (
    ServerOptions,
    check,
    command,
    environment,
    find_vllm,
    model_config,
    write_first_adapter,
)

LOG_LINES = 20
GRACE_SECONDS = 10.0
"""Seconds from SIGTERM to SIGKILL, for the whole process group."""
_GUARDED = "/is_paused"
"""A development route without side effects, to test that the key is required."""


class ServerProcess:
    """A vLLM server that ends, workers included, by :meth:`stop` or with this process, even after kill -9.
    Raises ``InputError`` if vLLM is not installed, or cannot serve with these options."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self._vllm = find_vllm(options.program)
        check(options, self._vllm)
        self._guard: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def url(self) -> str:
        return self.options.url

    @property
    def alive(self) -> bool:
        """True while the process runs, even if the model is still loading."""
        return self._guard is not None and self._guard.poll() is None

    def launch(self) -> None:
        """Start the server without waiting for it. Raises ``InputError`` if the port is taken."""
        self.stop()
        self._check_port()
        log = self.options.log_file
        log.parent.mkdir(parents=True, exist_ok=True)
        if self.options.lora_rank:
            write_first_adapter(self.options.adapter_folder, model_config(self.options.model))
        words = command(self.options, self._vllm)
        with log.open("ab") as file:
            self._log_start = file.tell()
            # In its own session, so that Ctrl-C reaches only this process, which ends the group in order.
            self._guard = subprocess.Popen(
                [sys.executable, "-I", str(Path(guard.__file__)), str(GRACE_SECONDS), *words],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment(on_cpu=self._vllm.on_cpu, gpus=self.options.gpus),
            )

    def wait(self, pause: Callable[[], None] = lambda: time.sleep(0.25)) -> None:
        """Wait until the server is healthy, calling ``pause``, whose exceptions propagate, between checks.

        Raises ``TrainingError`` if the server ends or exceeds ``start_seconds`` (the message has the end of
        its log), or if there is a key but it answers requests without it.
        """
        seconds = self.options.start_seconds
        end = time.monotonic() + seconds
        while not self.healthy():
            if not self.alive:
                raise TrainingError(f"vLLM ended during its start; {self.log_end()}")
            if time.monotonic() > end:
                raise TrainingError(f"vLLM is not ready after {seconds:g} s; {self.log_end()}")
            pause()
        if api_key() is not None and (status := self._status(_GUARDED, timeout_seconds=60)) != 401:
            raise TrainingError(f"vLLM does not require the key: {self.url}{_GUARDED} answers {status}")

    def healthy(self) -> bool:
        """Return True if the server runs and its health route answers 200."""
        return self.alive and self._status("/health", timeout_seconds=5.0) == 200

    def _status(self, route: str, timeout_seconds: float) -> int | None:
        """Return the status of a GET without the key; None: no answer."""
        # Not urllib, which would use a proxy from the environment.
        host, port = self.options.connect_host, self.options.port
        connection = http.client.HTTPConnection(host, port, timeout=timeout_seconds)
        try:
            connection.request("GET", route)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def stop(self) -> None:
        """End the server and all of its processes, within 20 seconds. Does nothing if it is not running."""
        process, self._guard = self._guard, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS + 5)
        finally:
            # In case the guard itself was killed. Repeat until no process holds memory or ports, at most 5 s.
            end = time.monotonic() + 5
            with suppress(ProcessLookupError, PermissionError):  # PermissionError: zombies on macOS
                while time.monotonic() < end:
                    os.killpg(process.pid, signal.SIGKILL)
                    time.sleep(0.02)
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)

    def log_end(self) -> str:
        """Return the log file's name and its last lines since this start."""
        log = self.options.log_file
        with log.open("rb") as file:
            file.seek(self._log_start)
            lines = file.read().decode(errors="replace").splitlines()
        return "\n  ".join([f"the end of {log}:", *lines[-LOG_LINES:]])

    def _check_port(self) -> None:
        """Raise ``InputError`` if the port is taken: another server would be mistaken for ours."""
        host, port = self.options.host, self.options.port
        if not 0 < port < 2**16:  # getaddrinfo would use it modulo 2**16
            raise InputError(f"--port {port}: must be from 1 to 65535")
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            socket.create_server(address[:2], family=family).close()  # with SO_REUSEADDR, as vLLM does
            if is_loopback(str(address[0])) and not self.options.loopback_only:  # /etc/hosts of Debian
                raise InputError(f"--host {host} is {address[0]} here, which no other machine reaches")
        except OSError as error:
            raise InputError(f"--host {host} --port {port}: {error.strerror or error}") from None
