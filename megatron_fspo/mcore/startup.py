"""Process groups: torch.distributed and Megatron's parallel state, started once."""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.distributed.rendezvous import rendezvous

from megatron_fspo.config import Parallel
from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.job.control import JobControl
from megatron_fspo.job.parent import end_with_parent
from megatron_fspo.job.start_id import agree_on_start_id
from megatron_fspo.mcore.backend import Backend
from megatron_fspo.parallel.control import Control, Patience
from megatron_fspo.parallel.groups import ParallelGroups

_jobs = itertools.count()
_TELL_SECONDS = 60.0  # for the others to start, so that they hear why there will be no job
_control: Control | None = None
_joined: tuple[Store, int, int] | None = None


@contextmanager
def job() -> Iterator[None]:
    """Hold all that a rank does: an error of one ends the others with its message, and all leave together.

    An error before the job is joined, in a file that only this machine has perhaps, reaches them, too. And a
    rank ends when torchrun's agent does.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        end_with_parent()
    try:
        yield
        if _control is not None:
            _control.meet("the end of the run")
    except BaseException as error:
        others = _control is not None or "MASTER_ADDR" in os.environ
        if others and not (isinstance(error, SystemExit) and not error.code):
            with suppress(Exception):  # nobody to tell
                (_control or _connect(Parallel(collective_seconds=_TELL_SECONDS))).fail(error)
        raise
    finally:
        stop()


def join(backend: Backend, *, parallel: Parallel | None = None) -> Control:
    """Join the job that torchrun started; a lone process is a job of one. Does nothing while joined.

    Raises:
        TrainingError: some ranks do not come in the time of ``parallel``, or failed before they did.
    """
    global _control
    backend.install()
    if _control is not None:
        return _control
    parallel = parallel or Parallel()
    # At its exit the interpreter would look for cycles in all that Megatron and torch imported, for seconds.
    atexit.register(gc.freeze)
    _control = _connect(parallel)
    _control.meet("the ranks to start", seconds=parallel.collective_seconds)
    if dist.is_initialized():
        return _control
    store, rank, world_size = _rendezvous(parallel.collective_seconds)
    dist.init_process_group(
        backend.collectives,
        # After stop() the job may be joined again; the addresses of the first time are stale.
        store=PrefixStore(f"megatron_fspo/{next(_jobs)}", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=parallel.collective_seconds),
        device_id=backend.device if backend.device.type == "cuda" else None,
    )
    # One that is connected to all, and leaves at once, would break the group for those that still connect.
    _control.meet("the ranks to connect", seconds=parallel.collective_seconds)
    return _control


def _connect(parallel: Parallel) -> Control:
    """Join the control of the job, by which ranks wait and are watched, on a connection of its own."""
    store, rank, world_size = _rendezvous(parallel.collective_seconds)
    patience = Patience(wait=parallel.wait_seconds, silence=parallel.silence_seconds)
    if world_size == 1:
        return Control(patience)
    return JobControl(
        PrefixStore(f"megatron_fspo/control/{next(_jobs)}", store.clone()),  # type: ignore[attr-defined]
        rank,
        world_size,
        patience,
        # torchrun's agent has the store, else the first rank.
        hosts=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        speaks=os.environ.get("LOCAL_RANK", "0") == "0",
    )


def _rendezvous(seconds: float) -> tuple[Store, int, int]:
    """Return the store in which the ranks find each other, rank and world size."""
    global _joined
    if dist.is_initialized():  # by a program that uses this as a library
        return _get_default_store(), dist.get_rank(), dist.get_world_size()
    if _joined is None:
        alone = "MASTER_ADDR" not in os.environ
        _joined = (HashStore(), 0, 1) if alone else _of_environment(seconds)
    return _joined


def _of_environment(seconds: float) -> tuple[Store, int, int]:
    """Rendezvous by the variables of the environment that a launcher sets.

    Raises:
        InputError: a variable is missing or wrong, or the port is in use.
        TrainingError: nobody answers there, or not all ranks come.
    """
    try:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
    except ValueError as error:
        raise InputError(f"the environment of this rank: {error}") from None
    except dist.DistError as error:
        address = f"MASTER_ADDR = {os.environ['MASTER_ADDR']}, MASTER_PORT = {os.environ.get('MASTER_PORT')}"
        if "EADDRINUSE" in str(error):
            raise InputError(f"{address}: the port is in use, choose another") from None
        raise TrainingError(f"{address}: nobody answers: {str(error).splitlines()[0]}") from None
    return PrefixStore(agree_on_start_id(store, rank, size, seconds=seconds), store), rank, size


def start(backend: Backend, *, parallel: Parallel, seed: int) -> ParallelGroups:
    """Join the job and build its groups; every rank of a model initialises weights from the same stream.

    Megatron's rank order, innermost first: tensor, context, data, pipeline. An expert-parallel group is a run
    of neighbours within a pipeline stage. The layout fits the world size
    (:func:`~megatron_fspo.mcore.sizes.check_world`).
    """
    control = join(backend, parallel=parallel)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        # Megatron asks for None where there is one chunk per stage.
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.interleaved else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
        # Second groups for gathering checkpoints through the CPU, which checkpoint.py does not do.
        create_gloo_process_groups=False,
        distributed_timeout_minutes=parallel.collective_seconds / 60,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return ParallelGroups.of(parallel_state, control)


def stop() -> None:
    """Leave the job."""
    global _control
    if _control is not None:
        _control.close()
        _control = None
    parallel_state.destroy_model_parallel()
    # Megatron caches RoPE tables by module, and a module holds its context-parallel group: a gloo group that
    # outlives its backend aborts the interpreter's exit now and then.
    RotaryEmbedding.forward.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    # Models and their hooks hold each other and their groups, whose threads go on until they are collected.
    gc.collect()
