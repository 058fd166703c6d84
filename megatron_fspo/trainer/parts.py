"""The parts that training and evaluation share, made from checked inputs."""

from __future__ import annotations

from megatron_fspo.mcore.decode import Decoder
from megatron_fspo.mcore.policy import Policy
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.rollout.embedded import EmbeddedEngine
from megatron_fspo.rollout.engine import RolloutEngine
from megatron_fspo.trainer.prepare import Inputs


def build_policy(inputs: Inputs, groups: ParallelGroups) -> Policy:
    """A policy whose weights are still to be loaded."""
    config = inputs.config
    return Policy(
        inputs.arch,
        inputs.backend,
        groups,
        parallel=config.parallel,
        dtype=inputs.dtype,
        optimizer=config.optimizer,
    )


def build_engine(inputs: Inputs, policy: Policy) -> RolloutEngine:
    """The sampler that ``rollout.engine`` names."""
    decoder = Decoder(policy.model, vocab_size=inputs.arch.vocab_size)
    return EmbeddedEngine(decoder, max_batch=inputs.config.rollout.max_batch)
