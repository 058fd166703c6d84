"""Joins and leaves a job several times, with a model each time; prints the threads left after each."""

from __future__ import annotations

import os

import torch

from megatron_fspo.mcore.backend import choose_backend
from megatron_fspo.mcore.startup import start, stop
from megatron_fspo.verify.cases import SMALL, random_weights
from megatron_fspo.verify.layouts import parse_layout
from megatron_fspo.verify.production import build


def main() -> None:
    backend = choose_backend("cpu")
    layout = parse_layout("tp2", world_size=2)
    for _ in range(4):
        groups = start(backend, parallel=layout.parallel, seed=1)
        rank = groups.tp.rank()
        policy = build(layout, SMALL, random_weights(SMALL), backend, groups, torch.float32)
        del policy, groups
        stop()
        if rank == 0:
            print("threads:", len(os.listdir("/proc/self/task")), flush=True)


if __name__ == "__main__":
    main()
