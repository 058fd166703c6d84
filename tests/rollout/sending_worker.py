"""On every rank of a training job: weights through the production sender to the servers of each case.

sending_worker.py OUT BUCKET_BYTES TIMEOUT_SECONDS CASES

CASES is JSON, a list of {"checkpoint", "dtype", "urls", "left"}. Each case sends the checkpoint as version 1
to "urls", then twice the weights as version 2, which fails, and again to those that are left.
Writes OUT/results.json, and both versions of a checkpoint as OUT/NAME-1 and OUT/NAME-2.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fspo import config as options
from megatron_fspo.job.remote import Loop, http_client
from megatron_fspo.mcore.machine.backend import choose_backend
from megatron_fspo.mcore.machine.startup import start, stop
from megatron_fspo.mcore.model.policy import Policy
from megatron_fspo.mcore.state.hf_weights import export_hf, hf_tensors, load_hf
from megatron_fspo.parallel.buckets import in_buckets
from megatron_fspo.rollout.client import send_weights
from megatron_fspo.rollout.client.send_weights import BroadcastSender
from megatron_fspo.rollout.client.server import Server
from megatron_fspo.weights import read_architecture

LAYOUT = options.Parallel(tensor=2, pipeline=2)


class Job:
    """A policy on all ranks, and the first rank's sender."""

    def __init__(self, policy: Policy, timeout_seconds: float) -> None:
        self._policy = policy
        self._loop = Loop("rollout")
        self._http = http_client()
        self._server_at = cache(lambda url: Server(url, self._http))
        self._sender = BroadcastSender("gloo", address="127.0.0.1", timeout_seconds=timeout_seconds)

    def send(self, urls: Sequence[str], version: int) -> dict[str, Any]:
        """The result of an update; {} on all ranks but the first."""
        tensors = hf_tensors(self._policy, [chunk.named_parameters() for chunk in self._policy.chunks])
        if dist.get_rank():
            assert not list(tensors)
            return {}
        servers, begin = [self._server_at(url) for url in urls], time.monotonic()
        problem = send_weights.send_weights(servers, self._sender, self._loop, tensors, version)
        return {"problem": problem and str(problem), "seconds": time.monotonic() - begin}

    def close(self) -> None:
        self._sender.close()
        self._loop.run(self._http.aclose())
        self._loop.close()


@torch.no_grad()
def double(policy: Policy) -> None:
    for chunk in policy.chunks:
        for parameter in chunk.parameters():
            parameter.mul_(2)


def run(case: dict[str, Any], policy: Policy, timeout_seconds: float) -> dict[str, Any]:
    load_hf(policy, Path(case["checkpoint"]))
    job = Job(policy, timeout_seconds)
    result = {"first": job.send(case["urls"], 1)}
    double(policy)
    result["fault"] = job.send(case["urls"], 2)
    result["second"] = job.send(case["left"], 2)
    job.close()
    return result


def main() -> None:
    out, bucket_bytes, timeout_seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    backend = choose_backend("cpu")
    send_weights.in_buckets = partial(in_buckets, bucket_bytes=bucket_bytes)
    results = []
    for checkpoint, cases in groupby(json.loads(sys.argv[4]), lambda case: Path(case["checkpoint"])):
        together = list(cases)
        policy = Policy(
            read_architecture(checkpoint),
            backend,
            start(backend, parallel=LAYOUT, seed=1),
            parallel=LAYOUT,
            dtype=getattr(torch, together[0]["dtype"]),
            optimizer=options.Optimizer(),
        )
        load_hf(policy, checkpoint)
        export_hf(policy, out / f"{checkpoint.name}-1", source=checkpoint)
        double(policy)
        export_hf(policy, out / f"{checkpoint.name}-2", source=checkpoint)
        results += [run(case, policy, timeout_seconds) for case in together]
        first = dist.get_rank() == 0
        del policy
        stop()
    if first:
        (out / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
