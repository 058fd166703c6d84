"""Policies on this rank, and passes through them: for workers, in any layout, dtype and kind of layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from backend import BACKEND, LAYERS
from cases import C_DUAL, TEMPERATURE, C
from megatron_fspo import config as options
from megatron_fspo.mcore.machine.backend import choose_backend
from megatron_fspo.mcore.machine.startup import start
from megatron_fspo.mcore.model.policy import Model, Policy
from megatron_fspo.mcore.model.policy_loss import Observer, PolicyLoss, Scoring
from megatron_fspo.mcore.state.hf_weights import load_hf
from megatron_fspo.objective import FSPOBand, LengthFairDualClip
from megatron_fspo.objective.surrogate import SequenceLevel
from megatron_fspo.packing.batch import MicroBatch, MicroBatches
from megatron_fspo.packing.pack import pack
from megatron_fspo.parallel.groups import ParallelGroups, gather_lists, pack_layout
from megatron_fspo.types import Sample
from megatron_fspo.weights import read_architecture
from packs import sequences_of


def new_groups(parallel: options.Parallel, layers: Any = LAYERS) -> tuple[Any, ParallelGroups]:
    """Backend and groups; models made before keep theirs."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    backend = choose_backend(BACKEND, layers)
    return backend, start(backend, parallel=parallel, seed=1)


def build(
    checkpoint: Path,
    parallel: options.Parallel,
    *,
    dtype: torch.dtype = torch.float32,
    layers: Any = LAYERS,
    load: bool = True,
    optimizer: options.Optimizer | None = None,
    **more: Any,
) -> Policy:
    """A policy with the weights of a checkpoint; without ``load`` they are NaN."""
    backend, groups = new_groups(parallel, layers)
    # By default no clipping: the gradient is compared as it is.
    optimizer = optimizer or options.Optimizer(lr=1e-9, clip_grad=1e9)
    arch = read_architecture(checkpoint)
    policy = Policy(arch, backend, groups, parallel=parallel, dtype=dtype, optimizer=optimizer, **more)
    if load:
        load_hf(policy, checkpoint)
    return policy


def scoring_of(model: Model, temperature: float = TEMPERATURE) -> Scoring:
    return Scoring(groups=model.groups, vocab_size=model.arch.vocab_size, temperature=temperature)


def loss_of(model: Model, observer: Observer, temperature: float = TEMPERATURE) -> PolicyLoss:
    objective = SequenceLevel(band=FSPOBand(c_low=C, c_high=C), dual_clip=LengthFairDualClip(c=C_DUAL))
    return PolicyLoss(objective=objective, scoring=scoring_of(model, temperature), observer=observer)


def make_micro_batches(model: Model, samples: Sequence[Sample], max_tokens: int) -> MicroBatches:
    """Micro-batches of this rank, as the trainer makes them."""
    layout = pack_layout(
        model.groups,
        model.backend.device,
        sequence=model.parallel.sequence,
        interleaved=model.parallel.interleaved,
        align=model.fp8.align,
    )
    return pack(sequences_of(samples), replace(layout, max_tokens=max_tokens))


def by_token(batches: Iterable[MicroBatch], values: Sequence[Tensor], groups: ParallelGroups) -> Tensor:
    """Values [t] of packs at all response tokens of all ranks, by sample and position."""
    found = [
        (index, position, value)
        for batch, here in zip(batches, values, strict=True)
        for row, index in enumerate(batch.sample_index.tolist())
        for mask in [batch.loss_mask & (batch.segment == row)]
        for position, value in zip(batch.position_ids[0, mask].tolist(), here[mask].tolist(), strict=True)
    ]
    return torch.tensor([value for _, _, value in sorted(gather_lists(found, group=groups.dp_cp))])
