"""The parts that training and evaluation share, made from checked inputs."""

from __future__ import annotations

from torch.nn import Module

from megatron_fspo.mcore.decode import Decoder
from megatron_fspo.mcore.hf_weights import load_chunks
from megatron_fspo.mcore.model import build_chunks
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
        recompute=config.model.recompute == "full",
    )


def build_reference(inputs: Inputs, policy: Policy) -> list[Module] | None:
    """The model that a KL penalty pulls towards: ``model.checkpoint``, frozen, in the policy's layout."""
    if not inputs.config.loss.kl_coef:
        return None
    chunks = build_chunks(inputs.arch, policy.config, inputs.backend)
    load_chunks(chunks, policy.config, inputs.arch, policy.groups, inputs.config.model.checkpoint)
    for chunk in chunks:
        chunk.requires_grad_(False)
    return [*chunks]


def build_engine(inputs: Inputs, policy: Policy) -> RolloutEngine:
    """The sampler that ``rollout.engine`` names."""
    decoder = Decoder(policy.chunks, policy.groups, vocab_size=inputs.arch.vocab_size)
    return EmbeddedEngine(decoder, max_batch=inputs.config.rollout.max_batch)
