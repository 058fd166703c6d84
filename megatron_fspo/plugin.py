"""FSPO in a Megatron-Core program of your own: all that it needs, in one import.

Sequences become packed micro-batches with :func:`pack`; ``PolicyLoss(...).forward_step`` goes to Megatron's
schedule; what FSPO is comes from :mod:`megatron_fspo.objective`. ``examples/plugin_only`` is such a program.
"""

from __future__ import annotations

from megatron_fspo.mcore.policy_loss import PolicyLoss, Scoring
from megatron_fspo.packing.batch import MicroBatch, Packs, Sequences
from megatron_fspo.packing.pack import PackLayout, pack
from megatron_fspo.parallel.groups import ParallelGroups

__all__ = [
    "MicroBatch", "PackLayout", "Packs", "ParallelGroups", "PolicyLoss", "Scoring", "Sequences", "pack",
]  # fmt: skip
