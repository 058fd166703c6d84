"""Models of random weights on this rank's GPU, and passes through them."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
from gpu_sizes import Step
from torch import Tensor

from megatron_fspo import config as options
from megatron_fspo.config.fp8 import BF16, FP8
from megatron_fspo.mcore.machine.transformer_engine import engine_problem
from megatron_fspo.mcore.model.policy import Model, Policy
from megatron_fspo.packing.batch import MicroBatches
from megatron_fspo.verify.cases import random_samples
from megatron_fspo.weights import Architecture
from passes import by_token, loss_of, make_micro_batches, new_groups, scoring_of

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
    backend, groups = new_groups(parallel, layers)
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


def step_micro_batches(model: Model, size: Step, max_tokens: int | None = None) -> MicroBatches:
    """Micro-batches of random samples."""
    rows = random_samples(size.shapes, vocab_size=model.arch.vocab_size, seed=3)
    return make_micro_batches(model, rows, max_tokens or size.max_tokens)


def scores(model: Model, size: Step, max_tokens: int | None = None) -> Tensor:
    """Log-probs of all response tokens, by sample and position: the same order for every packing."""
    batches = step_micro_batches(model, size, max_tokens)
    return by_token(batches, model.score(batches, scoring_of(model, 1.0)), model.groups)


def old_pass(policy: Policy, batches: MicroBatches) -> MicroBatches:
    """The micro-batches with log-probs of before the update."""
    return batches.with_columns(old_log_probs=policy.score(batches, scoring_of(policy, 1.0)))


def update(policy: Policy, batches: MicroBatches) -> tuple[float, float]:
    """One optimizer step: the largest |S| of this rank's sequences, and the norm of the gradient."""
    sums = [0.0]
    loss = loss_of(policy, lambda batch, terms, _: sums.extend(terms.log_ratio_sum.abs().tolist()), 1.0)
    found = policy.update(batches, loss)
    return max(sums), found.grad_norm


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result, and the seconds until the GPU was done with it."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    found = work()
    torch.cuda.synchronize()
    return found, time.perf_counter() - begin
