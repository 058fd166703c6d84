"""One vLLM server as a child: start, health, stop."""

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
from megatron_fspo.rollout.common import api_key
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
"""A development route that changes nothing."""


class ServerProcess:
    """A vLLM server that ends, workers and all, with :meth:`stop` or with this process, even by kill -9.

    Raises:
        InputError: vLLM is not there, or cannot serve this.
    """

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
        """True while the process runs. It may still be loading."""
        return self._guard is not None and self._guard.poll() is None

    def launch(self) -> None:
        """Start, and do not wait; an InputError if the port is taken."""
        self.stop()
        self._check_port()
        log = self.options.log_file
        log.parent.mkdir(parents=True, exist_ok=True)
        if self.options.lora_rank:
            write_first_adapter(self.options.adapter_folder, model_config(self.options.model))
        words = command(self.options, self._vllm)
        with log.open("ab") as file:
            self._log_start = file.tell()
            # In a session of its own: Ctrl-C in the terminal reaches us alone, and we end the group in order.
            self._guard = subprocess.Popen(
                [sys.executable, "-I", str(Path(guard.__file__)), str(GRACE_SECONDS), *words],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment(on_cpu=self._vllm.on_cpu, gpus=self.options.gpus),
            )

    def wait(self, pause: Callable[[], None] = lambda: time.sleep(0.25)) -> None:
        """Wait until it serves.

        Raises:
            TrainingError: it ended, or took more than ``start_seconds``, with the last lines of its log; or
                it has a key and answers without.
            BaseException: what ``pause`` raises between two looks.
        """
        seconds = self.options.start_seconds
        end = time.monotonic() + seconds
        while not self.healthy():
            if not self.alive:
                raise TrainingError(f"vLLM ended while it started; {self.log_end()}")
            if time.monotonic() > end:
                raise TrainingError(f"vLLM is not ready after {seconds:g} s; {self.log_end()}")
            pause()
        if api_key() is not None and (status := self._status(_GUARDED, timeout_seconds=60)) != 401:
            raise TrainingError(f"vLLM does not ask for the key: {self.url}{_GUARDED} answers {status}")

    def healthy(self) -> bool:
        """Return True if it answers that it serves."""
        return self.alive and self._status("/health", timeout_seconds=5.0) == 200

    def _status(self, route: str, timeout_seconds: float) -> int | None:
        """The status of the answer to a GET without the key; None for no answer."""
        # Not through urllib: a proxy in the environment is no way to this machine.
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
        """End it and all that it started, within some 15 seconds. May be called again, and before a start."""
        process, self._guard = self._guard, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS + 5)
        finally:
            # Also where the guard itself was killed. Until its memory and ports are free, or some seconds.
            end = time.monotonic() + 5
            with suppress(ProcessLookupError, PermissionError):  # the latter on macOS, for what is not reaped
                while time.monotonic() < end:
                    os.killpg(process.pid, signal.SIGKILL)
                    time.sleep(0.02)
            process.wait()

    def log_end(self) -> str:
        """The file, and the last lines of this start."""
        log = self.options.log_file
        with log.open("rb") as file:
            file.seek(self._log_start)
            lines = file.read().decode(errors="replace").splitlines()
        return "\n  ".join([f"the end of {log}:", *lines[-LOG_LINES:]])

    def _check_port(self) -> None:
        """Another server there would pass for ours."""
        host, port = self.options.host, self.options.port
        if not 0 < port < 2**16:  # getaddrinfo takes the rest of the division
            raise InputError(f"--port {port}: a port is from 1 to 65535")
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            socket.create_server(address[:2], family=family).close()  # with SO_REUSEADDR, as vLLM does
        except OSError as error:
            raise InputError(f"--host {host} --port {port}: {error.strerror or error}") from None
