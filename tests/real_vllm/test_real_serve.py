"""The end of a trainer that a server was being updated by. Needs VLLM_BIN."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch import environment
from real_server import distance, random_like, send, weights
from serving import Served

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TOLERANCE = 1e-4
FAR = 0.1

# The first trainer: it sends some buckets, says so, and hangs.
TRAINER = """
import sys, time
from functools import partial
from pathlib import Path
from megatron_fspo.rollout.client import weights as client_weights
from real_server import send, weights

client_weights.in_buckets = partial(client_weights.in_buckets, bucket_bytes=2**15)

class Slow(dict):
    def items(self):
        for number, pair in enumerate(super().items()):
            if number == 12:
                print("half", flush=True)
                time.sleep(600)
            yield pair

send(sys.argv[1], Slow(weights(Path(sys.argv[2]))), 7)
"""


def test_a_trainer_killed_in_the_middle_of_an_update_leaves_no_half_of_it(
    checkpoint: Path, pair: list[Served], tmp_path: Path
) -> None:
    """The server answers nobody until the next trainer has sent a whole one."""
    routes = pair[0].routes
    old, new = (random_like(checkpoint, tmp_path / str(seed), seed=seed) for seed in (0, 1))
    assert send(routes.url, weights(old), 5) is None
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, routes.url, str(new)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(PYTHONPATH=os.pathsep.join(sys.path)),
    ) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "half\n"
        trainer.send_signal(signal.SIGKILL)
    assert routes.ask("/is_paused") == (200, {"is_paused": True})
    assert routes.version == "5"

    assert send(routes.url, weights(new), 6) is None
    assert distance(routes, new) < TOLERANCE < FAR < distance(routes, old)
    assert routes.version == "6"
