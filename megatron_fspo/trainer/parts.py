"""The parts that training and evaluation share, made from checked inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor

from megatron_fspo.mcore.decode import Decoder
from megatron_fspo.mcore.fp8 import without_fp8
from megatron_fspo.mcore.hf_weights import hf_tensors, load_hf
from megatron_fspo.mcore.offload import Offload
from megatron_fspo.mcore.policy import Model, Policy
from megatron_fspo.mcore.policy_loss import Scoring
from megatron_fspo.mcore.score import score_sequences
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.rollout.client import proof
from megatron_fspo.rollout.client.connect import connect, settle
from megatron_fspo.rollout.client.engine import Leader, Trainer, VLLMEngine
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


def open_servers(inputs: Inputs, groups: ParallelGroups) -> Leader | None:
    """On the first rank, what talks to the servers. To be called before a model is built: servers on the
    trainer's GPUs give up their memory. Collective.

    Raises:
        TrainingError: one did not.
        InputError: one cannot.
    """
    config, leader = inputs.config, None
    if config.rollout.engine != "vllm":
        return None
    if dist.get_rank() == 0:
        leader = connect(config.vllm, inputs.arch.vocab_size)
        leader.loop.run(settle(leader, colocated=config.vllm.colocated))
    groups.control.meet("the servers to give up their memory")
    return leader


def build_engine(inputs: Inputs, model: Model, servers: Leader | None, *others: Model) -> RolloutEngine:
    """The sampler that ``rollout.engine`` names.

    Args:
        model: what it samples from.
        servers: of :func:`open_servers`.
        others: models that only training needs.
    """
    if inputs.config.rollout.engine == "vllm":
        return _build_vllm(inputs, model, servers, others)
    decoder = Decoder(model.chunks, model.groups, vocab_size=inputs.arch.vocab_size)
    return EmbeddedEngine(decoder, max_batch=inputs.config.rollout.max_batch)


def _build_vllm(inputs: Inputs, model: Model, leader: Leader | None, others: Sequence[Model]) -> VLLMEngine:
    vocab_size, options = inputs.arch.vocab_size, inputs.config.vllm

    def tensors() -> Iterator[tuple[str, Tensor]]:
        # Data and context parallel ranks hold the same weights: one copy of the model sends.
        if model.groups.dp_cp.rank() == 0:
            yield from hf_tensors(model, [chunk.named_parameters() for chunk in model.chunks])

    return VLLMEngine(
        Trainer(tensors=tensors, score=partial(canary_scores, model)),
        model.groups,
        leader,
        canary_sequences=proof.canary_sequences(vocab_size, inputs.arch.max_position_embeddings),
        dtype=inputs.dtype,
        tolerance=options.canary_tolerance,
        memory=Offload(model, *others) if options.colocated else None,
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
