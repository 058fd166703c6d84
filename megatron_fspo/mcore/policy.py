"""The policy in training: scoring passes and optimizer steps on Megatron's schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_fspo import config as options
from megatron_fspo.errors import TrainingError
from megatron_fspo.mcore.backend import Backend
from megatron_fspo.mcore.model import build_model, padded_vocab_size, transformer_config, wrap_for_training
from megatron_fspo.mcore.policy_loss import PolicyLoss, Scoring, forward
from megatron_fspo.packing.batch import MicroBatch
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.parallel.metrics import add_metrics, reduce_metrics
from megatron_fspo.weights import Architecture


@dataclass(frozen=True, kw_only=True)
class Update:
    """What one optimizer step reports."""

    metrics: dict[str, float]
    """Reduced over all ranks."""
    grad_norm: float
    """Global norm before clipping."""
    learning_rate: float


class Policy:
    """A model with its optimizer on this rank.

    Attributes:
        model: the bare ``GPTModel``; its parameters are those of the wrapped one.
        optimizer: Megatron's.
        optimizer_steps: optimizer steps taken so far.
    """

    def __init__(
        self,
        arch: Architecture,
        backend: Backend,
        groups: ParallelGroups,
        *,
        parallel: options.Parallel,
        dtype: torch.dtype,
        optimizer: options.Optimizer,
    ) -> None:
        self.arch, self.backend, self.groups = arch, backend, groups
        self.config = transformer_config(
            arch, backend, tensor=parallel.tensor, sequence=parallel.sequence, dtype=dtype
        )
        self.padded_vocab = padded_vocab_size(arch.vocab_size, parallel.tensor)
        self.model = build_model(arch, self.config, backend)
        self._ddp = wrap_for_training(self.model, self.config)
        self._optimizer_config = _optimizer_config(optimizer, dtype)
        self._warmup_steps = optimizer.warmup_steps
        self.optimizer: MegatronOptimizer = get_megatron_optimizer(self._optimizer_config, [self._ddp])
        self.config.grad_scale_func = self.optimizer.scale_loss
        self._scheduler = _constant_after_warmup(self.optimizer, self._optimizer_config, self._warmup_steps)
        self.optimizer_steps = 0

    def weights_loaded(self) -> None:
        """Tell the optimizer that the parameters changed under it (bf16 keeps fp32 copies)."""
        self.optimizer.reload_model_params()

    def restore_schedule(self, optimizer_steps: int) -> None:
        """Continue the learning-rate schedule after ``optimizer_steps``."""
        self._scheduler = _constant_after_warmup(self.optimizer, self._optimizer_config, self._warmup_steps)
        self._scheduler.step(increment=optimizer_steps)
        self.optimizer_steps = optimizer_steps

    @torch.no_grad()
    def score(self, micro_batches: Sequence[MicroBatch], scoring: Scoring) -> list[Tensor]:
        """Log-probs [t] of the labels of each micro-batch: the old pass.

        Bit for bit what the training pass computes with the same weights and micro-batches.
        """

        def forward_step(data_iterator, model):  # type: ignore[no-untyped-def]
            batch = next(data_iterator)
            # Megatron calls the second part with non_loss_data=True and collects what it returns.
            return forward(batch, model), partial(log_probs, batch)

        def log_probs(batch: MicroBatch, logits: Tensor, non_loss_data: bool) -> Tensor:
            return scoring(batch, logits)[0]

        scores: list[Tensor] = self._run(
            forward_step, micro_batches, forward_only=True, collect_non_loss_data=True
        )
        return scores

    def update(self, micro_batches: Sequence[MicroBatch], loss: PolicyLoss) -> Update:
        """One optimizer step on all micro-batches of this rank (every rank has the same number of them).

        Raises:
            TrainingError: the gradient is not finite. On every rank alike; the weights are lost, the last
                checkpoint is not.
        """
        self._ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        parts = self._run(loss.forward_step, micro_batches, forward_only=False)
        # Megatron's schedules start at 0, which would waste the first step of a warm-up.
        self._scheduler.step(increment=1)
        _, grad_norm, _ = self.optimizer.step()
        if not math.isfinite(grad_norm):
            raise TrainingError(
                f"optimizer step {self.optimizer_steps + 1}: the gradient norm is {grad_norm}. "
                "Resume from the last checkpoint with a smaller optimizer.lr, or look for what overflows."
            )
        self.optimizer_steps += 1
        return Update(
            metrics=reduce_metrics(add_metrics(parts), group=self.groups.dp_cp),
            grad_norm=float(grad_norm),
            learning_rate=self.optimizer.param_groups[0]["lr"],
        )

    def _run(self, forward_step, micro_batches, **flags):  # type: ignore[no-untyped-def]
        schedule = get_forward_backward_func()
        return schedule(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=[self._ddp],
            num_microbatches=len(micro_batches),
            # Only shapes of pipeline messages, which variable_seq_lengths sends along.
            seq_length=1,
            micro_batch_size=1,
            **flags,
        )


def _optimizer_config(optimizer: options.Optimizer, dtype: torch.dtype) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        min_lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_eps=optimizer.eps,
        clip_grad=optimizer.clip_grad,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )


def _constant_after_warmup(
    optimizer: MegatronOptimizer, config: OptimizerConfig, warmup_steps: int
) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=warmup_steps + 1,
        lr_decay_style="constant",
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )
