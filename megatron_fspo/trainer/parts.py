"""The parts that training and evaluation share, made from checked inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from megatron_fspo.mcore.decode import Decoder
from megatron_fspo.mcore.hf_weights import hf_tensors, load_chunks
from megatron_fspo.mcore.model import build_chunks
from megatron_fspo.mcore.policy import Policy
from megatron_fspo.mcore.policy_loss import Scoring
from megatron_fspo.mcore.score import score_sequences
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.rollout.embedded import EmbeddedEngine
from megatron_fspo.rollout.engine import RolloutEngine
from megatron_fspo.rollout.vllm import canary
from megatron_fspo.rollout.vllm.connect import connect
from megatron_fspo.rollout.vllm.engine import Trainer, VLLMEngine
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
    if inputs.config.rollout.engine == "vllm":
        return _build_vllm(inputs, policy)
    decoder = Decoder(policy.chunks, policy.groups, vocab_size=inputs.arch.vocab_size)
    return EmbeddedEngine(decoder, max_batch=inputs.config.rollout.max_batch)


def _build_vllm(inputs: Inputs, policy: Policy) -> VLLMEngine:
    vocab_size, options = inputs.arch.vocab_size, inputs.config.vllm
    scoring = Scoring(groups=policy.groups, vocab_size=vocab_size, temperature=1.0)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        # Data and context parallel ranks hold the same weights: one copy of the model sends.
        if policy.groups.dp_cp.rank() == 0:
            yield from hf_tensors(policy, [chunk.named_parameters() for chunk in policy.chunks])

    def score(sequences: Sequence[Sequence[int]]) -> list[Tensor] | None:
        return score_sequences(
            lambda batches: policy.score(batches, scoring),
            sequences,
            arch=inputs.arch,
            groups=policy.groups,
            parallel=inputs.config.parallel,
            device=inputs.backend.device,
        )

    return VLLMEngine(
        Trainer(tensors=tensors, score=score),
        policy.groups,
        connect(options, vocab_size) if dist.get_rank() == 0 else None,
        canary_sequences=canary.canary_sequences(vocab_size, inputs.arch.max_position_embeddings),
        tolerance=options.canary_tolerance or canary.TOLERANCE[inputs.dtype],
    )
