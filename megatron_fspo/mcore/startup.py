"""Process groups: torch.distributed and Megatron's parallel state, started once."""

from __future__ import annotations

import atexit
import gc
import itertools
import os
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megatron_fspo.config import Parallel
from megatron_fspo.mcore.backend import Backend
from megatron_fspo.parallel.groups import ParallelGroups

_joined = itertools.count()


def join(backend: Backend, *, timeout_minutes: float = 30) -> None:
    """Join the job that torchrun started; a lone process is a job of one. Does nothing while joined."""
    backend.install()
    if dist.is_initialized():
        return
    store, rank, world_size = _rendezvous()
    _leave_garbage_at_exit()
    dist.init_process_group(
        backend.collectives,
        # After stop() the job may be joined again; the addresses of the first time are stale.
        store=PrefixStore(f"megatron_fspo/{next(_joined)}", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=timeout_minutes),
        device_id=backend.device if backend.device.type == "cuda" else None,
    )


@cache
def _leave_garbage_at_exit() -> None:
    """The interpreter would look for cycles in all that Megatron and torch imported, for seconds."""
    atexit.register(gc.freeze)


@cache
def _rendezvous() -> tuple[Store, int, int]:
    """Where the ranks find each other, rank and world size."""
    if "MASTER_ADDR" not in os.environ:
        return HashStore(), 0, 1
    store, rank, world_size = next(rendezvous("env://"))
    return store, rank, world_size


def start(backend: Backend, *, parallel: Parallel, seed: int) -> ParallelGroups:
    """Join the job and build its groups.

    Megatron's rank order, innermost first: tensor, context, data, pipeline. An expert-parallel group is a run
    of neighbours within a pipeline stage.

    Args:
        parallel: fits the world size (:func:`~megatron_fspo.mcore.model.check_world`).
        seed: for weight initialisation; every rank of a model gets the same stream.
    """
    join(backend)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=_virtual(parallel),
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
        # Second groups for gathering checkpoints through the CPU, which checkpoint.py does not do.
        create_gloo_process_groups=False,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return ParallelGroups(
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        ep=parallel_state.get_expert_model_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
    )


def _virtual(parallel: Parallel) -> int | None:
    """Megatron asks for None where there is one chunk per stage."""
    return parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None


def stop() -> None:
    """Leave the job."""
    parallel_state.destroy_model_parallel()
    # Megatron caches RoPE tables by module, and a module holds its context-parallel group: a gloo group that
    # outlives its backend aborts the interpreter's exit now and then.
    RotaryEmbedding.forward.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    # Models and their hooks hold each other and their groups, whose threads go on until they are collected.
    gc.collect()
