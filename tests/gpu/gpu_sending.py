"""Weights from this process to another one, by the sender and the receiver of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import IO, Any

import torch
from gpu_models import best_layers, build
from gpu_sizes import SIZES
from torch import Tensor

from backend import FAKE
from megatron_fspo.job.remote import Loop, http_client
from megatron_fspo.mcore.state.hf_weights import hf_tensors
from megatron_fspo.rollout.client import send_weights as client_weights
from megatron_fspo.rollout.client.send_weights import BroadcastSender
from megatron_fspo.rollout.client.server import Server

KIND = "gloo" if FAKE else "nccl"


def digest(tensor: Tensor) -> int:
    """Hash of the bytes."""
    return zlib.crc32(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())


def send() -> dict[str, Any]:
    """All weights of a model on the first GPU, and what changed; names that arrived on the second with other
    bytes."""
    model = build(SIZES.sent, best_layers())
    program = [sys.executable, str(Path(__file__).with_name("gpu_receiver.py")), KIND]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1"
    second = {**os.environ, "CUDA_VISIBLE_DEVICES": "1" if FAKE else visible.split(",")[1]}
    with subprocess.Popen(
        program, env=second, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as receiver:
        assert receiver.stdin is not None and receiver.stdout is not None
        try:
            seconds = _update(model, _said(receiver.stdout, "http"))
            receiver.stdin.write("what have you got?\n")
            receiver.stdin.flush()
            arrived = json.loads(_said(receiver.stdout, "{"))
        finally:
            _end(receiver)
    sent = dict(hf_tensors(model, [chunk.named_parameters() for chunk in model.chunks]))
    wanted = {name: digest(tensor) for name, tensor in sent.items()}
    differing = [name for name in {*wanted, *arrived} if wanted.get(name) != arrived.get(name)]
    return {
        "kind": KIND,
        "tensors": len(wanted),
        "differing": sorted(differing),
        "bytes": sum(tensor.nbytes for tensor in sent.values()),
        "seconds": seconds,
    }


def _said(stream: IO[str], start: str) -> str:
    """The next line that starts like this: NCCL may say something in between."""
    for line in stream:
        if line.startswith(start):
            return line.strip()
    raise AssertionError("the receiver has ended")


def _end(receiver: subprocess.Popen[str]) -> None:
    assert receiver.stdin is not None
    receiver.stdin.close()
    try:
        receiver.wait(30)
    except subprocess.TimeoutExpired:  # a broadcast that nobody sends
        receiver.kill()


def _update(model: Any, url: str) -> float:
    """Seconds of the second whole update, whose group is that of the first; others send what changed."""
    seconds = []
    with Loop("rollout") as loop:
        http = http_client()
        servers = [Server(url, http)]
        for delta in (False, True):
            sender = BroadcastSender(KIND, address="127.0.0.1", timeout_seconds=120, delta=delta)
            for _ in range(2):
                with torch.no_grad():
                    next(model.chunks[0].parameters())[:2] += int(delta)
                tensors = hf_tensors(model, [chunk.named_parameters() for chunk in model.chunks])
                begin = time.perf_counter()
                problem = client_weights.send_weights(servers, sender, loop, tensors, len(seconds))
                seconds.append(time.perf_counter() - begin)
                assert problem is None, problem
            sender.close()
        loop.run(http.aclose())
    return seconds[1]
