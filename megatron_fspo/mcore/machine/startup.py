"""Start and end of torch.distributed and of Megatron's parallel state."""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from ipaddress import ip_address

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_group, _get_default_store
from torch.distributed.rendezvous import rendezvous

from megatron_fspo.config import Parallel
from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.job.control import JobControl
from megatron_fspo.job.parent import end_with_parent
from megatron_fspo.job.start_id import agree_on_start_id
from megatron_fspo.mcore.machine.backend import Backend
from megatron_fspo.parallel.control import Control, Timeouts
from megatron_fspo.parallel.groups import ParallelGroups

_jobs = itertools.count()
_TELL_SECONDS = 60.0  # time for other ranks to connect and receive the error of one that failed early
_control: Control | None = None
_joined: tuple[Store, int, int] | None = None


@contextmanager
def job() -> Iterator[None]:
    """Context manager around all that a rank does: an error on one rank, even before it joins the job, ends
    the others with its message; on success all leave together. Under torchrun, a rank ends with its agent."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        end_with_parent()
    try:
        yield
        if _control is not None:
            _control.barrier("the end of the run")
    except BaseException as error:
        others = _control is not None or "MASTER_ADDR" in os.environ
        if others and not (isinstance(error, SystemExit) and not error.code):
            with suppress(Exception):  # the other ranks cannot be reached
                (_control or _connect(Parallel(collective_seconds=_TELL_SECONDS))).fail(error)
        raise
    finally:
        stop()


def join(backend: Backend, *, parallel: Parallel | None = None) -> Control:
    """Join the job that torchrun started; without it, a job of one process. Does nothing while joined. Raises
    ``TrainingError`` if ranks do not start within ``parallel.collective_seconds``, or fail before."""
    global _control
    backend.install()
    if _control is not None:
        return _control
    parallel = parallel or Parallel()
    # At exit the interpreter would otherwise collect garbage in torch and Megatron, for seconds.
    atexit.register(gc.freeze)
    _control = _connect(parallel)
    _control.barrier("the ranks to start", seconds=parallel.collective_seconds)
    if dist.is_initialized():
        return _control
    store, rank, world_size = _rendezvous(parallel)
    dist.init_process_group(
        backend.collectives,
        # A new prefix, as the job may be joined again after stop(), when old addresses are stale.
        store=PrefixStore(f"megatron_fspo/{next(_jobs)}", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=parallel.collective_seconds),
        # No device_id: with one, NCCL connects each of Megatron's groups, most of which nobody uses.
    )
    # A rank that left as soon as it is connected would break the group for those still connecting.
    _control.barrier("the ranks to connect", seconds=parallel.collective_seconds)
    return _control


def _connect(parallel: Parallel) -> Control:
    """Start the job's control (waits and heartbeat), on its own connection to the store."""
    store, rank, world_size = _rendezvous(parallel)
    timeouts = Timeouts(wait=parallel.wait_seconds, silence=parallel.silence_seconds)
    if world_size == 1:
        return Control(timeouts)
    return JobControl(
        PrefixStore(f"megatron_fspo/control/{next(_jobs)}", store.clone()),  # type: ignore[attr-defined]
        rank,
        world_size,
        timeouts,
        # The store is in torchrun's agent, or else in the first rank.
        hosts=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        speaks=os.environ.get("LOCAL_RANK", "0") == "0",
    )


def _rendezvous(parallel: Parallel) -> tuple[Store, int, int]:
    """Return the rendezvous store, rank and world size."""
    global _joined
    if dist.is_initialized():  # by a program that uses this package as a library
        return _get_default_store(), dist.get_rank(), dist.get_world_size()
    if _joined is None:
        alone = "MASTER_ADDR" not in os.environ
        _joined = (HashStore(), 0, 1) if alone else _rendezvous_by_environment(parallel)
    return _joined


def _rendezvous_by_environment(parallel: Parallel) -> tuple[Store, int, int]:
    """Rendezvous by the environment variables that a launcher sets.

    Raises:
        InputError: a variable is missing or invalid, the port is in use, or the address is a public one.
        TrainingError: there is no answer from the master address, or not all ranks start.
    """
    seconds, master = parallel.collective_seconds, os.environ["MASTER_ADDR"]
    with suppress(OSError):  # a name without an address has no answer below
        ip = socket.gethostbyname(master)
        if ip_address(ip).is_global and not parallel.public_address:
            raise InputError(
                f"MASTER_ADDR = {master} is the public address {ip}, and a job's ports have no password: use "
                "an address of the cluster's own network, or set parallel.public_address"
            )
    try:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
    except ValueError as error:
        raise InputError(f"environment variables of this rank: {error}") from None
    except dist.DistError as error:
        address = f"MASTER_ADDR = {master}, MASTER_PORT = {os.environ.get('MASTER_PORT')}"
        if "EADDRINUSE" in str(error):
            raise InputError(f"{address}: the port is in use, choose another one") from None
        raise TrainingError(f"{address}: no answer: {str(error).splitlines()[0]}") from None
    return PrefixStore(agree_on_start_id(store, rank, size, seconds=seconds), store), rank, size


def start(backend: Backend, *, parallel: Parallel, seed: int) -> ParallelGroups:
    """Join the job, build its process groups, and seed the random generators. Collective.

    Megatron's rank order, innermost first: tensor, context, data, pipeline. An expert-parallel group is a
    range of ranks within a pipeline stage. The layout must fit the world size
    (:func:`~megatron_fspo.mcore.machine.sizes.check_world`).
    """
    control = join(backend, parallel=parallel)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        # Megatron requires None for one chunk per stage.
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.interleaved else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
        # Only needed to gather checkpoints through the CPU, which checkpoint.py does not do.
        create_gloo_process_groups=False,
        distributed_timeout_minutes=parallel.collective_seconds / 60,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return ParallelGroups.of(parallel_state, control)


def connect_groups(groups: ParallelGroups, parallel: Parallel, device: torch.device) -> None:
    """Make the communicators of a training step. NCCL makes one with the first collective of its group, which
    would otherwise come when memory is full, and allocates on the GPU for it. Collective."""
    used = [_get_default_group(), groups.tp, groups.pp, groups.cp, groups.dp, groups.dp_cp]
    if parallel.expert > 1:
        used += [groups.ep, groups.edp]
    of_norm = "intra_distributed_optimizer_instance" if parallel.distributed_optimizer else "model_parallel"
    used.append(getattr(parallel_state, f"get_{of_norm}_group")())
    one = torch.zeros(1, device=device)
    for group in dict.fromkeys(used):  # every rank in this order, so that none waits in a circle
        if group.size() > 1:
            dist.all_reduce(one, group=group)


def stop() -> None:
    """Leave the job and destroy its process groups."""
    global _control
    if _control is not None:
        _control.close()
        _control = None
    parallel_state.destroy_model_parallel()
    # Megatron's cache of RoPE tables holds modules, and so context-parallel groups. A gloo group that
    # outlives its backend sometimes aborts the interpreter at exit.
    RotaryEmbedding.forward.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    # Models are in reference cycles with hooks and hold groups, whose threads run until they are collected.
    gc.collect()
