"""A step under way: its responses in packs, and what its optimizer steps have reported so far.

When the job is asked to stop between two optimizer steps, the step goes into the checkpoint: weights have
moved, so neither its responses nor their old log-probs could be made again. Responses and log-probs are
written by sequence, each rank what it holds, and read back under any layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_fspo.errors import InputError
from megatron_fspo.mcore.policy import Update
from megatron_fspo.packing.batch import MicroBatch
from megatron_fspo.packing.pack import Packs
from megatron_fspo.packing.sequences import Sequences
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.record.records import SequenceRecord
from megatron_fspo.trainer.rollout import COLUMNS, Rollout, rollout_of, with_advantages
from megatron_fspo.types import Prompt

_FOLDER = "under_way"
_ROLLOUT = "rollout.safetensors"
_TOKENS = "tokens_*.safetensors"
_PLACE = ("number", "place")
_FORMAT = 3
"""Of :meth:`Step.state_dict`. 1, without the key, had means of the metrics, which cannot be pooled; 2 had no
scores beside the rewards."""


@dataclass(kw_only=True)
class Step:
    """From the responses to the last optimizer step."""

    rollout: Rollout
    packs: Packs
    """Of all mini-batches, with their old log-probs."""
    sizes: list[int]
    """Packs of each mini-batch."""
    metrics: dict[str, float]
    """Of responses and old pass."""
    warm: bool
    """Whether it began after the learning rate's warm-up."""
    updates: list[Update] = field(default_factory=list)
    """One for every optimizer step taken."""
    first: dict[str, float] = field(default_factory=dict)
    """Metrics of the first one, before the policy has moved."""
    off_policy: list[SequenceRecord] = field(default_factory=list)
    nonfinite: int = 0
    """Sequences that optimizer steps had to do without, each counted in every one."""
    dropped: list[SequenceRecord] = field(default_factory=list)
    """Of responses that had to leave the packs, as they made a pass not finite."""

    @property
    def turn(self) -> int:
        """Which mini-batch is next."""
        return len(self.updates) % len(self.sizes)

    @property
    def mini_batch(self) -> Packs:
        """The packs of the next optimizer step."""
        return self.packs_of(self.turn)

    def packs_of(self, turn: int) -> Packs:
        """Those of one mini-batch."""
        first = sum(self.sizes[:turn])
        return self.packs[first : first + self.sizes[turn]]

    def turn_of(self, number: int) -> int:
        """Which mini-batch a response belongs to."""
        return number * len(self.sizes) // len(self.rollout)

    def dropped_from(self, turn: int) -> list[SequenceRecord]:
        """Of one mini-batch."""
        return [record for record in self.dropped if self.turn_of(record.sample) == turn]

    def state_dict(self) -> dict[str, Any]:
        """What is the same on every rank, as JSON types."""
        return {
            "format": _FORMAT,
            "prompts": [prompt.index for prompt in self.rollout.prompts],
            "samples": self.rollout.samples,
            "metrics": self.metrics,
            "warm": self.warm,
            "updates": [asdict(update) for update in self.updates],
            "first": self.first,
            "off_policy": [asdict(record) for record in self.off_policy],
            "nonfinite": self.nonfinite,
            "dropped": [asdict(record) for record in self.dropped],
        }

    def write(self, checkpoint: Path, groups: ParallelGroups) -> list[Path]:
        """Write this rank's part of the rest into the folder of a checkpoint; returns its files."""
        folder = checkpoint / _FOLDER
        folder.mkdir(exist_ok=True)
        written = []
        if dist.get_rank() == 0:
            # Clones: the columns may be views of one table.
            columns = {name: getattr(self.rollout, name).clone() for name in (*COLUMNS, "advantages")}
            written.append(folder / _ROLLOUT)
            save_file(columns, written[0])
        if groups.tp.rank() or groups.pp.rank():
            return written  # they hold what the first of each holds
        tensors = _by_place(self.packs)
        if groups.cp.rank() == 0:
            sequences = self.packs.sequences
            tensors |= {f"sequences.{one.name}": getattr(sequences, one.name) for one in fields(sequences)}
        written.append(folder / f"tokens_{dist.get_rank():05d}.safetensors")
        save_file(tensors, written[-1])
        return written


def is_under_way(state: Mapping[str, Any]) -> bool:
    """Whether a checkpoint, by its state, was written between two optimizer steps of one step."""
    return state.get("under_way") is not None


def read_step(
    checkpoint: Path,
    state: Mapping[str, Any],
    prompts: Sequence[Prompt],
    pack: Callable[..., tuple[Packs, list[int]]],
) -> Step:
    """Read back a step from a checkpoint.

    Args:
        state: what :meth:`Step.state_dict` gave.
        prompts: all of the run, by index.
        pack: :func:`~megatron_fspo.trainer.batches.make_mini_batches`, but for ``rollout``, ``read`` and
            ``dropped``.

    Raises:
        InputError: another version wrote it, or responses are missing.
    """
    if state.get("format", 1) != _FORMAT:
        raise InputError(
            f"{checkpoint}: the step under way in it has format {state.get('format', 1)}, of another version "
            f"of megatron_fspo; this one reads format {_FORMAT}. Resume with that version, or delete this "
            "checkpoint to go on from the one before"
        )
    folder = checkpoint / _FOLDER
    columns = load_file(folder / _ROLLOUT)
    advantages = columns.pop("advantages")
    table = torch.stack([columns[name].double() for name in COLUMNS], 1)
    rollout = rollout_of([prompts[i] for i in state["prompts"]], state["samples"], table, {})
    rollout = with_advantages(rollout, advantages)
    dropped = [SequenceRecord(**record) for record in state["dropped"]]
    packs, sizes = pack(
        rollout=rollout,
        read=lambda numbers: _read_sequences(folder, numbers),
        dropped=[record.sample for record in dropped],
    )
    return Step(
        rollout=rollout,
        packs=_with_columns(packs, folder, len(rollout)),
        sizes=sizes,
        metrics=state["metrics"],
        warm=state["warm"],
        updates=[_update(update) for update in state["updates"]],
        first=state["first"],
        off_policy=[SequenceRecord(**record) for record in state["off_policy"]],
        nonfinite=state["nonfinite"],
        dropped=dropped,
    )


def _update(state: Mapping[str, Any]) -> Update:
    """From JSON, which knows no tuples."""
    return Update(**{**state, "totals": {name: tuple(pair) for name, pair in state["totals"].items()}})


def _by_place(packs: Packs) -> dict[str, Tensor]:
    """The packs' columns at the response tokens of this rank, and which token each value is of."""
    parts: dict[str, list[Tensor]] = {name: [] for name in (*_PLACE, *packs.columns)}
    for number, batch in enumerate(packs):
        sequence, place = _tokens(batch, packs.sequences)
        parts["number"].append(sequence)
        parts["place"].append(place)
        for name, tensors in packs.columns.items():
            parts[name].append(tensors[number][batch.mask])
    return {name: torch.cat(tensors).cpu() for name, tensors in parts.items()}


def _tokens(batch: MicroBatch, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Number of the sequence, and place in the response, of each token inside the mask."""
    number = batch.sample_index[batch.segment[batch.mask]]
    prompts = torch.zeros(max(sequences.index.tolist(), default=0) + 1, dtype=torch.long)
    prompts[sequences.index] = sequences.prompt_lengths
    return number, batch.position_ids[0, batch.mask] + 1 - prompts.to(number.device)[number]


def _read_sequences(folder: Path, numbers: list[int]) -> Sequences:
    """Those of some numbers, wherever they were written."""
    found: dict[int, tuple[Tensor, Tensor, Tensor, float]] = {}
    for path in sorted(folder.glob(_TOKENS)):
        tensors = load_file(path)
        if "sequences.index" in tensors:
            held = {n.partition(".")[2]: v for n, v in tensors.items() if n.startswith("sequences.")}
            found |= Sequences(**held).rows()
    if missing := sorted(set(numbers) - found.keys()):
        raise InputError(f"{folder}: {len(missing)} responses of the step under way are missing")
    rows = [found[number] for number in numbers]
    return Sequences.of(
        prompts=[prompt for prompt, *_ in rows],
        responses=[response for _, response, *_ in rows],
        log_probs=[log_probs for *_, log_probs, _ in rows],
        advantages=[advantage for *_, advantage in rows],
        index=numbers,
    )


def _with_columns(packs: Packs, folder: Path, samples: int) -> Packs:
    """The packs with the columns that were written, each value at its token."""
    lengths = torch.zeros(samples, dtype=torch.long)
    lengths[packs.sequences.index] = packs.sequences.lengths
    begin = lengths.cumsum(0) - lengths
    flat: dict[str, Tensor] = {}
    for path in sorted(folder.glob(_TOKENS)):
        tensors = load_file(path)
        mine = lengths[tensors["number"]] > 0
        at = (begin[tensors["number"]] + tensors["place"])[mine]
        for name in tensors.keys() - {*_PLACE}:
            if not name.startswith("sequences."):
                values = tensors[name][mine]
                flat.setdefault(name, values.new_zeros(int(lengths.sum())))[at] = values
    columns: dict[str, list[Tensor]] = {name: [] for name in flat}
    for batch in packs:
        number, place = _tokens(batch, packs.sequences)
        at = begin[number.cpu()] + place.cpu()
        for name, values in flat.items():
            column = values.new_zeros(batch.mask.shape)
            column[batch.mask.cpu()] = values[at]
            columns[name].append(column.to(batch.mask.device))
    return packs.with_columns(**columns)
