"""A step in progress: its responses in packs, and what its optimizer steps have reported so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_fspo.mcore.policy import Update
from megatron_fspo.packing.pack import Packs
from megatron_fspo.record.records import SequenceRecord
from megatron_fspo.trainer.rollout import Rollout


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
