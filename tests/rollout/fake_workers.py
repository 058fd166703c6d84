"""A server in vLLM's place whose workers, threads here, take weights with the plugin's own receiver."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor

from megatron_fspo.rollout.links import Join, Receiver, join_gloo

CPU = torch.device("cpu")


class Worker:
    """One rank: what it has loaded."""

    def __init__(self, join: Join, device: torch.device) -> None:
        self.receiver = Receiver(join, device)
        self.loaded: dict[str, Tensor] = {}

    def load(self, info: dict[str, Any], fault: Callable[[], None] | None) -> None:
        """A bucket; ``fault`` comes after the first tensor of it."""
        for name, tensor in self.receiver.tensors(info["names"], info["dtype_names"], info["shapes"]):
            if name in self.loaded:
                raise RuntimeError(f"{name} came twice")
            self.loaded[name] = tensor
            if fault is not None:
                fault()


class Workers:
    """A server of ``count`` workers; the routes of an update answer as vLLM's do.

    ``fault`` is what happens in the second bucket of the next update, once, after a tensor of it: ``raise``
    (in all workers), ``hang`` (the first worker stops for good) or ``die`` (the server is gone).
    """

    def __init__(self, count: int, join: Join = join_gloo, device: torch.device = CPU) -> None:
        self._count = count
        self._join, self._device = join, device
        self.asked: list[tuple[str, Any]] = []
        self.finished: dict[str, list[dict[str, Tensor]]] = {}
        """Version → what each worker has."""
        self.fault: str | None = None
        self._dead = False
        self._end = threading.Event()
        self._engine = threading.Lock()  # vLLM's does one thing after the other
        self.restart()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def restart(self) -> None:
        """As after a crash: workers without weights, and no update under way."""
        self._workers = [Worker(self._join, self._device) for _ in range(self._count)]
        self._active, self._buckets, self._dead = False, 0, False

    def close(self) -> None:
        self._end.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        self._workers.clear()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answer(self, route: str, body: Any) -> object:
        """What the route says; an error is a 500."""
        self.asked.append((route, body))
        if route == "/get_world_size":
            return {"world_size": self._count}
        if route == "/misbehave":
            self.fault = body["fault"]
        else:
            with self._engine:
                self._do(route, body)
        return {"success": True}

    def _do(self, route: str, body: Any) -> None:
        if route == "/init_weight_transfer_engine":
            self._init(**body["init_info"])
        if route == "/start_weight_update":
            if self._active:
                raise RuntimeError("an update is under way")
            self._active, self._buckets = True, 0
            for worker in self._workers:
                worker.loaded = {}
        if route == "/update_weights":
            self._update(body["update_info"])
        if route == "/finish_weight_update":
            if not self._active:
                raise RuntimeError("no update is under way")
            self._active = False
            if body is not None:
                self.finished[body["weight_version"]] = [worker.loaded for worker in self._workers]

    def _init(
        self, master_address: str, master_port: int, world_size: int, rank_offset: int, timeout_seconds: float
    ) -> None:
        def connect(number: int) -> None:
            self._workers[number].receiver.connect(
                master_address,
                master_port,
                rank=rank_offset + number,
                size=world_size,
                timeout=timedelta(seconds=timeout_seconds),
            )

        self._everywhere(connect)

    def _update(self, info: dict[str, Any]) -> None:
        if not self._active:
            raise RuntimeError("no update is under way")
        self._buckets += 1
        fault = None
        if self._buckets == 2 and self.fault:
            fault, self.fault = self.fault, None
        try:
            self._everywhere(lambda number: self._workers[number].load(info, self._act(fault, number)))
        except BaseException:
            self._active = False
            raise

    def _act(self, fault: str | None, number: int) -> Callable[[], None] | None:
        def act() -> None:
            if fault == "hang" and number == 0:
                self._end.wait()
            if fault == "die":
                self._dead = True
            if fault in ("die", "raise"):
                self._workers[number].receiver.close()
                raise RuntimeError("no room for the weights")

        return act if fault else None

    def _everywhere(self, work: Callable[[int], None]) -> None:
        """In all workers at once; the first error, when all have ended."""
        with ThreadPoolExecutor(self._count) as pool:
            for done in [pool.submit(work, number) for number in range(self._count)]:
                done.result()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        workers = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                text = self.rfile.read(length)
                status, answer = 200, None
                try:
                    answer = workers.answer(self.path.split("?")[0], json.loads(text) if text else None)
                except RuntimeError as error:
                    status, answer = 500, {"error": {"message": str(error)}}
                if workers._dead:
                    return  # the connection ends without an answer
                body = json.dumps(answer).encode()
                with suppress(OSError):  # who asked may be gone
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler
