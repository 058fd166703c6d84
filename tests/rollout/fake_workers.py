"""A server in vLLM's place whose workers, threads here, take weights with the plugin's own receiver."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from fake_server import good_answer
from torch import Tensor

from megatron_fspo.rollout.checksum import checksum
from megatron_fspo.rollout.delta import Held
from megatron_fspo.rollout.links import Join, Receiver, join_gloo

Sent = Iterable[tuple[str, Tensor]]

CPU = torch.device("cpu")


class Workers:
    """A server of ``count`` workers; the routes of an update answer as vLLM's do.

    ``fault`` is what happens in the second update. Before its second bucket: ``hang`` (the first worker stops
    for good) or ``leave`` (the server ends, while the trainer waits for it). After the first tensor of that
    bucket: ``raise`` (in all workers) or ``die`` (the server ends).
    """

    def __init__(
        self,
        count: int,
        join: Join = join_gloo,
        device: torch.device = CPU,
        fault: str | None = None,
        served: torch.dtype | None = None,
    ) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.finished: dict[str, list[dict[str, Tensor]]] = {}
        """Version → what each worker has."""
        self._fault = fault
        self.served = served
        self.decode: Callable[[Held, Sent], Sent] = Held.decode
        self._new_receivers = lambda: [Receiver(join, device) for _ in range(count)]
        self._receivers = self._new_receivers()
        self._held: list[Held | None] = []
        self._loaded: list[dict[str, Tensor]] = []
        self._active, self._dead = False, False
        self._updates = 0
        self._end = threading.Event()
        self._engine = threading.Lock()  # vLLM's does one thing after the other
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = False  # one in a broadcast would abort an ending interpreter
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Workers:
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._http.shutdown()
        self._http.server_close()
        self._receivers.clear()

    def restart(self) -> None:
        """Have new workers, that know of nothing."""
        for receiver in self._receivers:
            receiver.close()
        self._receivers = self._new_receivers()

    def _answer(self, route: str, body: Any) -> object:
        """What the route says; an error is a 500."""
        self.asked.append((route, body))
        if route == "/get_world_size":
            return {"world_size": len(self._receivers)}
        with self._engine:
            if route == "/init_weight_transfer_engine":
                self._connect(**body["init_info"])
            if route == "/start_weight_update":
                self._check(active=False)
                self._active, self._loaded = True, [{} for _ in self._receivers]
                self._updates += 1
            if route == "/update_weights":
                self._check(active=True)
                assert body == {"update_info": {}}
                self._update()
            if route == "/collective_rpc":
                sums = [{name: checksum(tensor) for name, tensor in one.items()} for one in self._loaded]
                return {"results": [{n: one.to_words() for n, one in worker.items()} for worker in sums]}
            if route == "/inference/v1/generate":
                rows = [{str(token): {"logprob": -1.0}} for token in body["token_ids"][1:]]
                return good_answer(0) | {"prompt_logprobs": [None, *rows]}
            if route == "/finish_weight_update":
                self._check(active=True)
                self._active = False
                if body is not None:
                    self.finished[body["weight_version"]] = self._loaded
        return {"success": True}

    def _check(self, *, active: bool) -> None:
        if self._active is not active:
            raise RuntimeError(f"an update is under way: {self._active}")

    def _connect(
        self,
        master_address: str,
        master_port: int,
        world_size: int,
        rank_offset: int,
        timeout_seconds: float,
        joined: bool = False,
        delta: bool = False,
    ) -> None:
        how = {"size": world_size, "timeout": timedelta(seconds=timeout_seconds), "joined": joined}
        self._everywhere(
            lambda number: self._receivers[number].connect(
                master_address, master_port, rank=rank_offset + number, **how
            )
        )
        if not joined:
            self._held = [Held() if delta else None for _ in self._receivers]

    def _update(self) -> None:
        def load(number: int) -> None:
            receiver = self._receivers[number]
            try:
                self._load(number, receiver)
            except BaseException:
                receiver.close()
                raise

        try:
            self._everywhere(load)
        except BaseException:
            self._active = False
            raise

    def _load(self, number: int, receiver: Receiver) -> None:
        loaded, held = self._loaded[number], self._held[number]
        for bucket, sent in enumerate(receiver.buckets(), start=1):
            for name, tensor in sent if held is None else self.decode(held, sent):
                loaded[name] = tensor.to(self.served or tensor.dtype, copy=True)
                if (self._updates, bucket) == (2, 2) and self._fault in ("die", "raise"):
                    self._dead = self._fault == "die"
                    raise RuntimeError("no room for the weights")
                del tensor  # it is a view of the bucket
            if (self._updates, bucket, self._fault, number) == (2, 1, "hang", 0):
                self._end.wait()
            if (self._updates, bucket, self._fault) == (2, 1, "leave"):
                time.sleep(0.5)
                self._dead = True
                raise RuntimeError("the end")

    def _everywhere(self, work: Callable[[int], None]) -> None:
        """In all workers at once; the first error, when all have ended."""
        with ThreadPoolExecutor(len(self._receivers)) as pool:
            list(pool.map(work, range(len(self._receivers))))

    def _handler(workers: Workers) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, answer = 200, None
                try:
                    answer = workers._answer(self.path.split("?")[0], json.loads(text) if text else None)
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
