"""Process groups: torch.distributed and Megatron's parallel state, started once."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron_fspo.mcore.backend import Backend
from megatron_fspo.parallel.groups import ParallelGroups


def start(backend: Backend, *, tensor: int, seed: int, timeout_minutes: float = 30) -> ParallelGroups:
    """Join the job that torchrun started and build the groups.

    Args:
        tensor: tensor-parallel size; divides the world size (checked by the caller, with a clear message).
        seed: for weight initialisation; every rank of a model gets the same stream.
    """
    backend.install()
    if not dist.is_initialized():
        dist.init_process_group(
            backend.collectives,
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            timeout=timedelta(minutes=timeout_minutes),
            init_method=None if "MASTER_ADDR" in os.environ else "tcp://127.0.0.1:0",
            device_id=backend.device if backend.device.type == "cuda" else None,
        )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return ParallelGroups(
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
    )


def stop() -> None:
    """Leave the job."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
