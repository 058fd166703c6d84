"""Models of random weights on this rank's GPU, and passes through them."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from gpu_sizes import Step
from megatron.core import parallel_state
from torch import Tensor

from megatron_fspo import config as options
from megatron_fspo.config.fp8 import BF16, FP8
from megatron_fspo.mcore.backend import choose_backend
from megatron_fspo.mcore.engine import engine_problem
from megatron_fspo.mcore.policy import Model, Policy
from megatron_fspo.mcore.policy_loss import PolicyLoss, Scoring
from megatron_fspo.mcore.startup import start
from megatron_fspo.objective import FSPOBand, LengthFairDualClip
from megatron_fspo.objective.policy_objective import SequenceLevel
from megatron_fspo.packing.batch import Packs
from megatron_fspo.packing.pack import pack
from megatron_fspo.parallel.groups import gather_lists, pack_layout
from megatron_fspo.verify.cases import random_samples
from megatron_fspo.weights import Architecture
from packs import sequences_of

ALONE = options.Parallel()


def best_layers() -> str:
    """Transformer Engine's, where it is there."""
    return "local" if engine_problem() else "transformer_engine"


def build(
    arch: Architecture,
    layers: str,
    *,
    parallel: options.Parallel = ALONE,
    fp8: FP8 = BF16,
    recompute: bool = False,
    train: bool = False,
) -> Any:
    """A :class:`Model` in bf16, or a :class:`Policy` to train; other models keep their groups."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    backend = choose_backend("cuda", layers)  # type: ignore[arg-type]
    groups = start(backend, parallel=parallel, seed=1)
    more: dict[str, Any] = {"parallel": parallel, "dtype": torch.bfloat16, "recompute": recompute, "fp8": fp8}
    if train:
        more["optimizer"] = options.Optimizer(lr=1e-5, warmup_steps=0)
    model = (Policy if train else Model)(arch, backend, groups, **more)
    fill(model)
    return model


@torch.no_grad()
def fill(model: Model) -> None:
    """Random weights that keep the size of what passes through; the same for the same names of matrices."""
    for chunk in model.chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)  # norms
            else:
                torch.manual_seed(zlib.crc32(name.encode()))
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
    model.weights_loaded()


def packs_of(model: Model, size: Step, max_tokens: int | None = None) -> Packs:
    """Micro-batches of random samples."""
    rows = random_samples(size.shapes, vocab_size=model.arch.vocab_size, seed=3)
    layout = pack_layout(
        model.groups,
        model.backend.device,
        sequence=model.parallel.sequence,
        interleaved=model.parallel.interleaved,
        align=model.fp8.align,
    )
    return pack(sequences_of(rows), replace(layout, max_tokens=max_tokens or size.max_tokens))


def scoring_of(model: Model) -> Scoring:
    """At temperature 1."""
    return Scoring(groups=model.groups, vocab_size=model.arch.vocab_size, temperature=1.0)


def scores(model: Model, size: Step, max_tokens: int | None = None) -> Tensor:
    """Log-probs of all response tokens, by sample and position: the same order for every packing."""
    batches = packs_of(model, size, max_tokens)
    found = [
        (index, position, value)
        for batch, score in zip(batches, model.score(batches, scoring_of(model)), strict=True)
        for row, index in enumerate(batch.sample_index.tolist())
        for here in [batch.mask & (batch.segment == row)]
        for position, value in zip(batch.position_ids[0, here].tolist(), score[here].tolist(), strict=True)
    ]
    return torch.tensor([value for _, _, value in sorted(gather_lists(found, group=model.groups.dp_cp))])


def old_pass(policy: Policy, batches: Packs) -> Packs:
    """The micro-batches with log-probs of before the update."""
    return batches.with_columns(old_log_probs=policy.score(batches, scoring_of(policy)))


def update(policy: Policy, batches: Packs) -> tuple[float, float]:
    """One optimizer step: the largest |S| of this rank's sequences, and the norm of the gradient."""
    sums = [0.0]
    loss = PolicyLoss(
        objective=SequenceLevel(band=FSPOBand(c_low=0.05, c_high=0.05), dual_clip=LengthFairDualClip(c=0.1)),
        scoring=scoring_of(policy),
        observer=lambda batch, terms: sums.extend(terms.log_ratio_sum.abs().tolist()),
    )
    found = policy.update(batches, loss)
    return max(sums), found.grad_norm


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result, and the seconds until the GPU was done with it."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    found = work()
    torch.cuda.synchronize()
    return found, time.perf_counter() - begin
