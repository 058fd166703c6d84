"""The parts that training and evaluation share, made from checked inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor

from megatron_fspo.mcore.decode import Decoder
from megatron_fspo.mcore.fp8 import without_fp8
from megatron_fspo.mcore.hf_weights import hf_tensors, load_hf
from megatron_fspo.mcore.policy import Model, Policy
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
        optimizer=config.optimizer.over(config.optimizer_steps),
        recompute=config.model.recompute == "full",
        fp8=config.fp8,
    )


def load_model(inputs: Inputs, groups: ParallelGroups) -> Model:
    """``model.checkpoint`` in the policy's layout, without gradients or an optimizer. Collective."""
    config = inputs.config
    model = Model(
        inputs.arch, inputs.backend, groups, parallel=config.parallel, dtype=inputs.dtype, fp8=config.fp8
    )
    load_hf(model, config.model.checkpoint)
    return model


def build_engine(inputs: Inputs, model: Model) -> RolloutEngine:
    """The sampler that ``rollout.engine`` names; ``model`` is what it samples from."""
    if inputs.config.rollout.engine == "vllm":
        return _build_vllm(inputs, model)
    decoder = Decoder(model.chunks, model.groups, vocab_size=inputs.arch.vocab_size)
    return EmbeddedEngine(decoder, max_batch=inputs.config.rollout.max_batch)


def _build_vllm(inputs: Inputs, model: Model) -> VLLMEngine:
    vocab_size, options = inputs.arch.vocab_size, inputs.config.vllm

    def tensors() -> Iterator[tuple[str, Tensor]]:
        # Data and context parallel ranks hold the same weights: one copy of the model sends.
        if model.groups.dp_cp.rank() == 0:
            yield from hf_tensors(model, [chunk.named_parameters() for chunk in model.chunks])

    return VLLMEngine(
        Trainer(tensors=tensors, score=partial(canary_scores, model)),
        model.groups,
        connect(options, vocab_size) if dist.get_rank() == 0 else None,
        canary_sequences=canary.canary_sequences(vocab_size, inputs.arch.max_position_embeddings),
        dtype=inputs.dtype,
        tolerance=options.canary_tolerance,
    )


def canary_scores(model: Model, sequences: Sequence[Sequence[int]]) -> list[Tensor] | None:
    """Per sequence of n tokens the log-probs [n - 1] of all but the first, on the first rank. Collective.

    In bfloat16 also where training multiplies in FP8: what is to be proven is that weights are equal, and
    noise would cover small differences.
    """
    scoring = Scoring(groups=model.groups, vocab_size=model.arch.vocab_size, temperature=1.0)
    with without_fp8(model):
        return score_sequences(
            lambda batches: model.score(batches, scoring),
            sequences,
            arch=model.arch,
            groups=model.groups,
            parallel=model.parallel,
            device=model.backend.device,
        )
