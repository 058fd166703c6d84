"""What a save takes in memory at its peak: 135M parameters in bf16, resident bytes per parameter and rank;
and what a load takes in time.

torchrun --standalone --nproc-per-node 2 benchmarks/checkpoint_memory.py --distributed-optimizer
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from machine import ROOT, options_of

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 1024,
}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--asynchronous", action="store_true", help="with the copy that lets training go on")
    parser.add_argument("--package", type=Path, default=ROOT, help="a tree of this or of an older commit")
    args = parser.parse_args()
    sys.path.insert(0, str(args.package))

    from megatron_fspo import config as options
    from megatron_fspo.mcore.machine.backend import choose_backend
    from megatron_fspo.mcore.machine.startup import join, start
    from megatron_fspo.mcore.model.policy import Policy
    from megatron_fspo.mcore.state import checkpoint
    from megatron_fspo.weights import read_architecture

    backend = choose_backend("cpu")
    join(backend)
    folders: list[str | None] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    folder = Path(str(folders[0]))
    if dist.get_rank() == 0:
        example = json.loads((ROOT / "examples/make_sum/checkpoint/config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**example, **SIZES}))
    dist.barrier()
    parallel = options.Parallel(distributed_optimizer=args.distributed_optimizer)
    groups = start(backend, parallel=parallel, seed=1)
    policy = Policy(
        read_architecture(folder),
        backend,
        groups,
        parallel=parallel,
        dtype=torch.bfloat16,
        optimizer=options.Optimizer(lr=1e-6),
    )
    for model in policy._ddp:
        model.zero_grad_buffer()
    policy.optimizer.step()  # makes the moments
    count = sum(parameter.numel() for parameter in policy.chunks[0].parameters())

    before, most, done = _resident(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], _resident() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    if args.package == ROOT:
        saving = checkpoint.begin_save(policy, folder / "saved", {}, snapshot=args.asynchronous)
        free = time.perf_counter() - began
        saving.finish(wait=True)
    else:
        checkpoint.save_checkpoint(policy, folder / "saved", {})
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    print(
        f"rank {dist.get_rank()}: {count / 1e6:.0f}M parameters, {before / count:.1f} bytes each before, "
        f"{most[0] / count:.1f} more during the save; {seconds:.1f} s, of which training waits "
        f"{free if args.asynchronous else seconds:.1f}",
        flush=True,
    )
    if args.package == ROOT:
        began = time.perf_counter()
        checkpoint._check_files(folder / "saved")
        dist.barrier()
        hashed = time.perf_counter() - began
        checkpoint.load_checkpoint(policy, folder / "saved")
        loaded = time.perf_counter() - began - hashed
        print(f"rank {dist.get_rank()}: a load takes {loaded:.1f} s, {hashed:.1f} s of them for the hashes")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
