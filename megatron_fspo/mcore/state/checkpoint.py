"""Save and resume: weights and optimizer as a distributed checkpoint.

All layouts, optimizers and dtypes use the format of Megatron's plain optimizer, so a run can resume in
another layout or dtype, with or without a distributed optimizer. Each weight is a global tensor under
Megatron's name; its optimizer state is in tensors ``optimizer.state.<what>.<name>`` of that shape:
``exp_avg``, ``exp_avg_sq``, and ``fp32_param`` if the weights are rounded. Each rank writes the values it
owns (:mod:`.parameter_state`) as boxes of these tensors, and reads the boxes it needs. Nothing is gathered,
and at most one box is in memory twice. Of Megatron's formats for a distributed optimizer,
``fully_reshardable`` gathers it on every rank (30 bytes per parameter), ``dp_reshardable`` is tied to the
layout, and ``fully_sharded_model_space`` raises an error (megatron-core 0.16 and 0.19).

A complete checkpoint gets its name by renaming ``<name>.partial``. Its ``SHA256SUMS`` has the hash of every
file, computed while writing. Before a resume the ranks verify these hashes, each for its share of the files.

A thread of each rank writes its files. Megatron's writer processes outlive a rank that dies, and are either
forked, which breaks with threads of CUDA or gloo, or started anew, for 400 MB and seconds each. Only the main
thread calls collectives: it polls whether all ranks are done, so no collective waits for a disk.

The trainer's state (step, prompt cursor, …) is stored as JSON. Random state is not saved: without dropout,
nothing draws from torch's generators once the model is built.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.mcore.model.policy import Policy
from megatron_fspo.mcore.state.parameter_state import (
    MOMENTS,
    Block,
    ParameterState,
    extra_states,
    parameter_states,
    prepare_optimizer,
)
from megatron_fspo.parallel.groups import any_rank, share
from megatron_fspo.weights.chunks import Box, ChunkReader, ChunkWriter, boxes, merge_indexes, write_index
from megatron_fspo.weights.folder import (
    SUMS,
    check_sums,
    digest,
    failed_read,
    patiently,
    read_sums,
    sync,
    write_sums,
)

T = TypeVar("T")

_STATE = "trainer.json"
_WEIGHTS = "torch_dist"
_BOX_BYTES = 16 * 2**20
_POLL_SECONDS = 0.1
_OPTIMIZER = "optimizer.state."
_MAIN = "fp32_param"
"""The plain optimizer's name in Megatron for the fp32 copy of the weights."""


class Saving:
    """A checkpoint that is being written, made by :func:`begin_save`."""

    def __init__(self, policy: Policy, folder: Path, state: dict[str, Any], *, snapshot: bool) -> None:
        self._folder = folder
        self._partial = _partial(folder)
        self._device = policy.backend.device
        own = {"optimizer_steps": policy.optimizer_steps, "function": policy.arch.function()}
        self._state = json.dumps({**state, **own}, indent=1)
        entries = _entries(list(parameter_states(policy)))
        self._entries = _taken(deque(entry.copy() for entry in entries)) if snapshot else entries
        self._extra_states = list(extra_states(policy))
        self._writer = ChunkWriter(self._partial / _WEIGHTS, rank=dist.get_rank())
        self._error: str | None = None
        self._sums: dict[str, str] = {}
        # Not a daemon thread, so that a run that fails elsewhere still writes all files.
        self._thread = threading.Thread(target=self._write, name=f"save {folder.name}")
        self._thread.start()

    def _write(self) -> None:
        try:
            with self._writer as writer:
                for entry in self._entries:
                    writer.declare(entry.key, entry.values.dtype, entry.shape)
                    writer.add(entry.key, entry.offsets, entry.values)
                for key in self._extra_states:
                    writer.add_object(key, [None])
                writer.close()
            self._sums = {f"{_WEIGHTS}/{name}": sha256 for name, sha256 in writer.sums.items()}
            sync(self._partial / _WEIGHTS)
        except Exception as error:  # finish() raises it on all ranks
            self._error = f"rank {dist.get_rank()}: {error}"

    def written(self, *, wait: bool) -> bool:
        """Return True if every rank has written its files or failed; ``wait`` until then. Collective."""
        while any_rank(self._thread.is_alive(), device=self._device):
            if not wait:
                return False
            self._thread.join(_POLL_SECONDS)
        return True

    def finish(self, *, wait: bool) -> bool:
        """Give the checkpoint its name once every rank has written its files; return False if ``wait`` is off
        and a rank is still writing. Collective.

        Raises:
            TrainingError: on every rank, if a rank could not write. Earlier checkpoints stay complete.
        """
        if not self.written(wait=wait):
            return False
        ranks: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object((self._error, self._writer.index, self._sums), ranks)
        _on_first_rank(lambda: self._complete(ranks or []), self._folder)
        return True

    def _complete(self, ranks: list[Any]) -> None:
        """Write index, state and hashes, given each rank's (error, index, hashes), and rename the folder."""
        if errors := [error for error, _, _ in ranks if error is not None]:
            raise OSError("; ".join(errors))
        data, state = self._partial / _WEIGHTS, self._partial / _STATE
        mine = [*write_index(data, merge_indexes(index for _, index, _ in ranks)), state]
        state.write_text(self._state, encoding="utf-8")
        sums = {str(path.relative_to(self._partial)): digest(path) for path in mine}
        for _, _, written in ranks:
            sums |= written
        write_sums(self._partial, sums)
        # Rename only when all files are on disk; callers delete older checkpoints when the new name is.
        sync(*mine, self._partial / SUMS, data, self._partial)
        self._partial.rename(self._folder)
        sync(self._folder.parent, self._folder.parent.parent)


def begin_save(policy: Policy, folder: Path, state: dict[str, Any], *, snapshot: bool) -> Saving:
    """Start to write a checkpoint; call ``finish`` before the next one. Collective.

    Args:
        policy: model and optimizer.
        folder: its final name; must not exist.
        state: JSON types only; the same on every rank.
        snapshot: copy the values to host memory first (14 bytes in bf16, 12 in fp32, per parameter that this
            rank writes). Otherwise do not change the policy until ``written`` returns True.

    Raises:
        TrainingError: on every rank, if the folder cannot be made.
    """
    _on_first_rank(lambda: _make_room(folder), folder)
    return Saving(policy, folder, state, snapshot=snapshot)


def save_checkpoint(policy: Policy, folder: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint, in the foreground; see :func:`begin_save`. Collective."""
    begin_save(policy, folder, state, snapshot=False).finish(wait=True)


def load_checkpoint(policy: Policy, folder: Path) -> dict[str, Any]:
    """Restore the policy and its optimizer, and return the trainer's state. Collective.

    Learning rate and other optimizer settings come from the run, not from the checkpoint.

    Raises:
        InputError: on every rank, if the folder is not a checkpoint of this trainer and model, is damaged, or
            holds a pickle that could run code.
        TrainingError: on every rank, if a file cannot be read; transient errors are retried first.
    """
    _alike(lambda: _check_files(folder))
    state = _alike(lambda: _read_state(folder))
    _check_function(folder, state["function"], policy.arch.function())
    reader = _alike(lambda: ChunkReader(folder / _WEIGHTS))
    _check_complete(reader, policy)
    _alike(lambda: _read_parameters(policy, reader, state["optimizer_steps"]))
    policy.restore_schedule(state["optimizer_steps"])
    return state


def _alike(read: Callable[[], T]) -> T:
    """Return the result of ``read`` if it succeeds on every rank. Else raise the same error on all ranks:
    ``TrainingError`` for an unreadable file, which may be intact, or ``InputError``. Collective."""
    result: T | None = None
    problem: tuple[bool, str] | None = None
    try:
        result = patiently(read)
    except (InputError, OSError) as error:
        problem = failed_read(error) is None, str(error)
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    # Read errors come first: False sorts before True.
    for damaged, text in sorted(filter(None, problems)):
        if damaged:
            raise InputError(text)
        raise TrainingError(
            f"the checkpoint cannot be read: {text}. It may be intact, and was not changed. Fix the file "
            "system or the permissions, then continue with --resume"
        )
    return cast(T, result)


def _check_files(folder: Path) -> None:
    """Verify the hashes of this rank's share of the files; raise ``InputError`` if one differs."""
    if not (folder / SUMS).exists():
        _read_state(folder)  # raises if the folder is not a checkpoint of this trainer
        raise InputError(f"{folder / SUMS} is missing; it has the hash of every file")
    sums = read_sums(folder)
    check_sums(folder, {name: sums[name] for name in sorted(sums)[dist.get_rank() :: dist.get_world_size()]})


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        state["optimizer_steps"], state["function"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{folder / _STATE}: not a checkpoint of this trainer: {error}") from error
    return state


def _check_function(folder: Path, stored: dict[str, Any], ours: dict[str, Any]) -> None:
    for name in sorted(stored.keys() | ours.keys()):
        if stored.get(name) != ours.get(name):
            raise InputError(
                f"{folder}: its weights are for {name} = {stored.get(name)}; the run has {ours.get(name)}: "
                "resume with the model.checkpoint and the [lora] of the run's config.toml"
            )


def _check_complete(reader: ChunkReader, policy: Policy) -> None:
    """Raise ``InputError`` on every rank if no rank takes a tensor of the checkpoint. Collective."""
    ours = {block.key for state in parameter_states(policy) for block in state.blocks}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, ours)
    if left := sorted(
        key for key in reader.tensors.keys() - set().union(*every) if not key.startswith(_OPTIMIZER)
    ):
        raise InputError(f"{reader.folder} has {len(left)} tensors that the model lacks, such as {left[0]}")


@dataclass(frozen=True)
class _Entry:
    """A box of a global tensor, with its values."""

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Tensor

    def copy(self) -> _Entry:
        return _Entry(self.key, self.shape, self.offsets, self.values.to("cpu", copy=True))


def _entries(states: Iterable[ParameterState]) -> Iterator[_Entry]:
    """Yield the boxes that this rank writes; the values are views."""
    for state in states:
        for block in (block for block in state.blocks if block.first_copy):
            for (at, sizes), first, end in _pieces(block, state.own.start, state.own.stop, _BOX_BYTES // 4):
                for key, values in _tensors(state, block.key, first, end):
                    yield _Entry(key, block.shape, at, values.view(sizes))


def _pieces(block: Block, first: int, end: int, limit: int) -> Iterator[tuple[Box, int, int]]:
    """Cut the block's share of the parameter's values ``first`` to ``end`` into boxes of the global tensor,
    each of at most ``limit`` values; yield each box with its first value and end in the parameter."""
    at, end = max(first, block.start), min(end, block.end)
    for offsets, sizes in boxes(block.sizes, at - block.start, end - block.start, limit=limit):
        stop = at + math.prod(sizes)
        yield (tuple(a + b for a, b in zip(block.offsets, offsets, strict=True)), sizes), at, stop
        at = stop


def _tensors(state: ParameterState, key: str, first: int, end: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the values ``first`` to ``end`` of a parameter and of its optimizer state, under their keys."""
    yield key, state.parameter.detach().view(-1)[first:end]
    if not state.parameter.requires_grad:
        return
    here = slice(first - state.first, end - state.first)
    if state.has_main_copy:
        yield _state_key(_MAIN, key), state.main[here]
    for name in MOMENTS:
        # There are no moments before the first step.
        values = state.moments[name] if name in state.moments else torch.zeros_like(state.main)
        yield _state_key(name, key), values[here]


def _state_key(what: str, key: str) -> str:
    return f"{_OPTIMIZER}{what}.{key}"


def _taken(entries: deque[_Entry]) -> Iterator[_Entry]:
    """Yield the entries, releasing each when the next is requested."""
    while entries:
        yield entries.popleft()


def _read_parameters(policy: Policy, reader: ChunkReader, steps: int) -> None:
    prepare_optimizer(policy, steps)
    for state in parameter_states(policy):
        for block in state.blocks:
            _check_shape(reader, block, policy.arch.vocab_size)
            main = _state_key(_MAIN, block.key)
            if main not in reader:
                main = block.key
            # fp32 weights have no main copy, so read them from the checkpoint's exact one.
            weights = block.key if state.parameter.dtype.itemsize < 4 else main
            _read(reader, weights, block, state.parameter.detach().view(-1), 0)
            if state.has_main_copy:
                _read(reader, main, block, state.main, state.first)
            for name, moment in state.moments.items():
                _read(reader, _state_key(name, block.key), block, moment, state.first)


def _read(reader: ChunkReader, key: str, block: Block, target: Tensor, first: int) -> None:
    """Fill the block's values in ``target``, which holds values of the parameter from ``first`` on."""
    pieces = _pieces(block, first, first + target.numel(), sys.maxsize)
    wanted = [(box, target[at - first : stop - first].view(box[1])) for box, at, stop in pieces]
    if wanted:
        reader.read_into(key, wanted)


def _check_shape(reader: ChunkReader, block: Block, vocab_size: int) -> None:
    stored = reader.shape(block.key)
    if stored == block.shape:
        return
    # Only the rows that pad the vocabulary may differ: they depend on the layout.
    if block.padded and stored[1:] == block.shape[1:] and stored[0] >= vocab_size:
        return
    raise InputError(f"{reader.folder}: {block.key} has shape {stored}; the model needs {block.shape}")


def _partial(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.partial")


def _make_room(folder: Path) -> None:
    """Make the folder to write in, and try to delete partial folders of killed runs beside it."""
    for left in folder.parent.glob("*.partial"):
        shutil.rmtree(left, ignore_errors=True)
    partial = _partial(folder)
    if os.path.lexists(partial):
        partial.rename(folder.with_name(f"{folder.name}.{time.time_ns()}.partial"))
    (partial / _WEIGHTS).mkdir(parents=True)


def _on_first_rank(action: Callable[[], None], folder: Path) -> None:
    """Run ``action`` on the first rank; raise ``TrainingError`` on all if it fails. Collective."""
    problem = None
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            problem = str(error)
    assert dist.group.WORLD is not None
    problem = share(problem, group=dist.group.WORLD)
    if problem is not None:
        raise TrainingError(
            f"{folder}: the checkpoint could not be written: {problem}. Earlier checkpoints are complete: "
            "fix the cause, then continue with --resume."
        )
