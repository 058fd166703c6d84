"""On every rank of a training job: weights through the production sender to the servers of each case.

sending_worker.py OUT BUCKET_BYTES TIMEOUT_SECONDS CASES

CASES is JSON, a list of {"checkpoint", "dtype", "urls", "fault"}. Each case sends the checkpoint as
version 1, then twice the weights as version 2, after an attempt into which the last server puts ``fault``.
Writes OUT/results.json, and both versions of a checkpoint as OUT/NAME-1 and OUT/NAME-2.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo import config as options
from megatron_fspo.job.remote import Loop, http_client
from megatron_fspo.mcore.backend import choose_backend
from megatron_fspo.mcore.hf_weights import export_hf, hf_tensors, load_hf
from megatron_fspo.mcore.policy import Policy
from megatron_fspo.mcore.startup import start, stop
from megatron_fspo.rollout.client import weights
from megatron_fspo.rollout.client.server import Server
from megatron_fspo.rollout.client.weights import BroadcastSender, in_buckets
from megatron_fspo.weights import read_architecture

LAYOUT = options.Parallel(tensor=2, pipeline=2)


class Held:
    """Bytes of gathered tensors that are alive on this rank.

    A thread of gloo may have its last tensor for a moment after the broadcast returned. So what exceeds
    ``limit`` and a tensor counts only if it is still there after a while, five seconds in all.
    """

    def __init__(self, limit: int) -> None:
        self.now = self.peak = self.largest = self.total = 0
        self._limit, self._patience = limit, 5.0

    def watch(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self.now += tensor.nbytes
            self.total += tensor.nbytes
            while self.now > self._limit + tensor.nbytes and self._patience > 0:
                time.sleep(0.01)
                self._patience -= 0.01
            self.peak = max(self.peak, self.now)
            self.largest = max(self.largest, tensor.nbytes)
            weakref.finalize(tensor, self._gone, tensor.nbytes)
            yield name, tensor

    def _gone(self, count: int) -> None:
        self.now -= count


class Job:
    """A policy on all ranks, and the first rank's sender."""

    def __init__(self, policy: Policy, bucket_bytes: int, timeout_seconds: float) -> None:
        self._policy, self._bucket_bytes = policy, bucket_bytes
        self._loop = Loop("rollout")
        self._http = http_client()
        self._sender = BroadcastSender("gloo", address="127.0.0.1", timeout_seconds=timeout_seconds)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in hf_tensors(self._policy, [c.named_parameters() for c in self._policy.chunks]):
            # Not the parameter itself, whose life says nothing.
            yield name, tensor.detach()

    def send(self, urls: Sequence[str], version: int, patient: bool = True) -> dict[str, Any]:
        """The result of an update; {} on all ranks but the first."""
        if dist.get_rank():
            assert not list(self.tensors())
            return {}
        servers = [Server(url, self._http) for url in urls]
        held, begin = Held(self._bucket_bytes if patient else sys.maxsize), time.monotonic()
        problem = weights.send_weights(servers, self._sender, self._loop, held.watch(self.tensors()), version)
        return {
            "problem": problem and str(problem),
            "seconds": time.monotonic() - begin,
            "peak": held.peak,
            "largest": held.largest,
            "total": held.total,
        }

    def close(self) -> None:
        self._loop.run(self._http.aclose())
        self._loop.close()


@torch.no_grad()
def double(policy: Policy) -> None:
    for chunk in policy.chunks:
        for parameter in chunk.parameters():
            parameter.mul_(2)


def run(case: dict[str, Any], policy: Policy, bucket_bytes: int, timeout_seconds: float) -> dict[str, Any]:
    load_hf(policy, Path(case["checkpoint"]))
    job, urls = Job(policy, bucket_bytes, timeout_seconds), case["urls"]
    result = {"first": job.send(urls, 1)}
    double(policy)
    if dist.get_rank() == 0:
        fault = json.dumps({"fault": case["fault"]}).encode()
        with urllib.request.urlopen(f"{urls[-1]}/misbehave", data=fault):
            pass
    # A broadcast that failed keeps its tensor until its time is over.
    result["fault"] = job.send(urls, 2, patient=False)
    result["second"] = job.send(urls if case["fault"] == "raise" else urls[:-1], 2)
    job.close()
    return result


def build(checkpoint: Path, dtype: str) -> Policy:
    backend = choose_backend("cpu")
    groups = start(backend, parallel=LAYOUT, seed=1)
    return Policy(
        read_architecture(checkpoint),
        backend,
        groups,
        parallel=LAYOUT,
        dtype=getattr(torch, dtype),
        optimizer=options.Optimizer(),
    )


def main() -> None:
    out, bucket_bytes, timeout_seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    cases = json.loads(sys.argv[4])
    weights.in_buckets = partial(in_buckets, bucket_bytes=bucket_bytes)
    results = []
    for checkpoint, group in groupby(cases, lambda case: Path(case["checkpoint"])):
        together = list(group)
        policy = build(checkpoint, together[0]["dtype"])
        load_hf(policy, checkpoint)
        export_hf(policy, out / f"{checkpoint.name}-1", source=checkpoint)
        double(policy)
        export_hf(policy, out / f"{checkpoint.name}-2", source=checkpoint)
        results += [run(case, policy, bucket_bytes, timeout_seconds) for case in together]
        first = dist.get_rank() == 0
        del policy
        stop()
    if first:
        (out / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
