"""gpu_receiver.py KIND: a server in vLLM's place on this process's first GPU. Prints its address; for each
line on stdin the digests of the weights that it has, as JSON; ends with stdin.
"""

from __future__ import annotations

import json
import sys

import torch
from fake_workers import Workers
from gpu_sending import digest

from megatron_fspo.rollout.links import join_gloo, join_nccl


def main() -> None:
    nccl = sys.argv[1] == "nccl"
    join, device = (join_nccl, "cuda") if nccl else (join_gloo, "cpu")
    with Workers(1, join, torch.device(device)) as workers:
        print(workers.url, flush=True)
        for _ in sys.stdin:
            (loaded,) = workers.finished[max(workers.finished)]
            print(json.dumps({name: digest(tensor) for name, tensor in loaded.items()}), flush=True)


if __name__ == "__main__":
    main()
