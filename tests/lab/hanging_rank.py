"""A rank of a job that hangs, with torch's flight recorder on: ``python hanging_rank.py FOLDER FAULT``.

The last of three ranks goes another way; after two seconds each rank writes its dump, as torch does when a
collective of NCCL takes too long, and ends. gloo has no such clock, so here a thread writes it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    _dump_fr_trace,
    _dump_fr_trace_json,
)

from megatron_fspo.parallel.groups import any_rank, broadcast_first


def write(folder: Path, rank: int, *, as_json: bool) -> None:
    time.sleep(2)
    dump = _dump_fr_trace_json() if as_json else _dump_fr_trace()
    (folder / f"comm_lib_trace_rank_{rank}").write_bytes(dump)
    time.sleep(1)  # a rank that ends would end the wait of the others
    os._exit(0)


def main(folder: Path, fault: str) -> None:
    dist.init_process_group("gloo")
    rank, cpu = dist.get_rank(), torch.device("cpu")
    odd = rank == 2
    any_rank(False, device=cpu)
    broadcast_first(torch.zeros(3), dist.group.WORLD)  # type: ignore[arg-type]
    threading.Thread(
        target=write, args=(folder, rank), kwargs={"as_json": fault == "other" and rank == 1}
    ).start()
    if fault == "other" and odd:
        broadcast_first(torch.zeros(3), dist.group.WORLD)  # type: ignore[arg-type]
    if not odd:
        any_rank(False, device=cpu)
    time.sleep(60)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
