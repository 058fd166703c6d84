"""All that a Megatron-Core training loop of your own needs for FSPO, in one import.

:func:`pack` packs sequences into micro-batches; ``PolicyLoss(...).forward_step`` is the forward step for
Megatron's schedule; bands are in :mod:`megatron_fspo.objective`. Example: ``examples/plugin_only``.
"""

from __future__ import annotations

from megatron_fspo.mcore.model.policy_loss import PolicyLoss, Scoring
from megatron_fspo.packing.batch import MicroBatch, MicroBatches, Sequences
from megatron_fspo.packing.pack import PackLayout, pack
from megatron_fspo.parallel.groups import ParallelGroups

__all__ = [
    "MicroBatch", "MicroBatches", "PackLayout", "ParallelGroups", "PolicyLoss", "Scoring", "Sequences", "pack"
]  # fmt: skip
