"""Save and resume: weights and optimizer as a Megatron distributed checkpoint, random states beside it.

A checkpoint folder appears under its name only when it is complete. What else a run must remember (step,
prompt cursor, …) is JSON, and the trainer's business.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer, MegatronOptimizer
from safetensors.torch import load_file, save_file

from megatron_fspo.errors import InputError
from megatron_fspo.mcore.policy import Policy
from megatron_fspo.weights import check_pickles

# Megatron's own is a process, for savers in the background, and its start takes seconds. We save in the
# foreground.
filesystem_async._results_queue = SimpleQueue()

_STATE = "trainer.json"
_WEIGHTS = "torch_dist"
# A distributed optimizer saves its state by parameter, not by rank: a run may resume on another layout.
_RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable"}


def save_checkpoint(policy: Policy, folder: Path, state: dict[str, Any]) -> None:
    """Write one checkpoint. Collective.

    Args:
        folder: its final name; must not exist.
        state: JSON types only; the same on every rank.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / _WEIGHTS).mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_sharded_state(policy, is_loading=False), str(partial / _WEIGHTS))
    save_file(_random_state(), str(partial / _random_file()))
    if dist.get_rank() == 0:
        state = {**state, "optimizer_steps": policy.optimizer_steps}
        (partial / _STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
    dist.barrier()
    if dist.get_rank() == 0:
        partial.rename(folder)
    dist.barrier()


def load_checkpoint(policy: Policy, folder: Path) -> dict[str, Any]:
    """Restore the policy, its optimizer and random states; returns the trainer's state. Collective.

    Raises:
        InputError: on every rank; the folder is not a checkpoint of this trainer, is damaged, or holds a
            pickle that could run code.
    """
    state: dict[str, Any] = read_state(folder)
    check_pickles(folder / _WEIGHTS)
    _prepare_to_load(policy.optimizer)
    loaded = dist_checkpointing.load(_sharded_state(policy, is_loading=True), str(folder / _WEIGHTS))
    for number, chunk in enumerate(policy.chunks):
        chunk.load_state_dict(loaded["model"][f"chunk{number}"])
    _load_optimizer(policy.optimizer, loaded["optimizer"])
    policy.restore_schedule(state["optimizer_steps"])
    random_file = folder / _random_file()
    if random_file.exists():  # a resume on more ranks than saved has no state for the new ones
        _restore_random_state(load_file(str(random_file)))
    return state


def read_state(folder: Path) -> dict[str, Any]:
    """The trainer's state of a checkpoint, without loading it."""
    try:
        state: dict[str, Any] = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{folder / _STATE}: not a checkpoint of this trainer: {error}") from None
    return state


def _sharded_state(policy: Policy, *, is_loading: bool) -> dict[str, Any]:
    # Megatron names every tensor by its layer in the whole model, so a chunk's number is only a place here.
    model = {f"chunk{number}": chunk.sharded_state_dict() for number, chunk in enumerate(policy.chunks)}
    return {
        "model": model,
        "optimizer": policy.optimizer.sharded_state_dict(
            {"model": model}, is_loading=is_loading, metadata=_RESHARDABLE
        ),
    }


def _distributed(optimizer: MegatronOptimizer) -> DistributedOptimizer | None:
    if isinstance(optimizer, ChainedOptimizer) and len(optimizer.chained_optimizers) == 1:
        optimizer = optimizer.chained_optimizers[0]
    return optimizer if isinstance(optimizer, DistributedOptimizer) else None


# What follows is for torch's Adam, which Megatron uses without Transformer Engine or apex, inside its
# DistributedOptimizer (0.16.1 and 0.19.2): that expects a state before the first step, finds a `step` beside
# the moments where it looks for moments only, and hands all parameters one `step` tensor, which then counts
# once per parameter.


def _prepare_to_load(optimizer: MegatronOptimizer) -> None:
    distributed = _distributed(optimizer)
    if distributed is None or not isinstance(distributed.optimizer, torch.optim.Adam):
        return
    inner = distributed.optimizer
    for parameter in (parameter for group in inner.param_groups for parameter in group["params"]):
        inner.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }


def _load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    distributed = _distributed(optimizer)
    if distributed is None or not isinstance(distributed.optimizer, torch.optim.Adam):
        optimizer.load_state_dict(state)
        return
    moments = state.pop("param_state")
    distributed.load_state_dict(state)
    held = list(distributed.optimizer.state.values())
    steps = [entry.pop("step").clone() for entry in held]
    distributed.load_parameter_state_from_fully_reshardable(moments)
    for entry, step in zip(held, steps, strict=True):
        entry["step"] = step


def _random_file() -> str:
    return f"random_{dist.get_rank():05d}.safetensors"


def _random_state() -> dict[str, torch.Tensor]:
    state = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
