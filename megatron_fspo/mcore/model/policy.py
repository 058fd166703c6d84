"""Models on Megatron's schedule: scoring passes and, for the trained policy, optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor
from torch.nn import Module

from megatron_fspo import config as options
from megatron_fspo.config.fp8 import BF16, FP8
from megatron_fspo.errors import TrainingError
from megatron_fspo.mcore.machine.backend import Backend
from megatron_fspo.mcore.machine.sizes import padded_vocab_size
from megatron_fspo.mcore.model.lora import install_adapters
from megatron_fspo.mcore.model.model import build_chunks, layer_offset, transformer_config, wrap_for_training
from megatron_fspo.mcore.model.policy_loss import PolicyLoss, Scoring
from megatron_fspo.mcore.model.router import RouterPass, RouterPasses
from megatron_fspo.packing.batch import MicroBatch, MicroBatches
from megatron_fspo.parallel.groups import ParallelGroups, Totals, any_rank, means, share, sum_metrics
from megatron_fspo.weights import Architecture


@dataclass(frozen=True, kw_only=True)
class Update:
    """Result of one optimizer step."""

    totals: Totals
    """Sum and denominator of each metric over all ranks; can be pooled over steps."""
    grad_norm: float
    """Global gradient norm before clipping."""
    learning_rate: float
    skipped: bool = False
    """The weights were not updated."""

    @property
    def metrics(self) -> dict[str, float]:
        """Means over this optimizer step."""
        return means(self.totals)


class Model:
    """This rank's part of a model for scoring, sampling and export, without gradients and optimizer.

    Its matrices are NaN until :func:`~megatron_fspo.mcore.state.hf_weights.load_hf` fills them.

    Attributes:
        chunks: the unwrapped ``GPTModel`` of each virtual pipeline stage.
        modules: the chunks, wrapped for Megatron's schedule, with the same parameters.
        config: Megatron's configuration.
        layers: indices of this rank's layers in the whole model.
        padded_vocab: rows of the embedding over all tensor-parallel ranks.
    """

    def __init__(
        self,
        arch: Architecture,
        backend: Backend,
        groups: ParallelGroups,
        *,
        parallel: options.Parallel,
        dtype: torch.dtype,
        recompute: bool = False,
        fp8: FP8 = BF16,
    ) -> None:
        self.arch, self.backend, self.groups, self.parallel = arch, backend, groups, parallel
        self.fp8 = fp8
        self.config = transformer_config(
            arch, backend, parallel=parallel, dtype=dtype, recompute=recompute, fp8=fp8
        )
        self.padded_vocab = padded_vocab_size(arch.vocab_size, parallel.tensor)
        self.chunks = build_chunks(arch, self.config, backend)
        self.layers = [
            layer_offset(self.config, chunk) + i
            for chunk in self.chunks
            for i in range(len(chunk.decoder.layers))
        ]
        if arch.adapters:
            for chunk in self.chunks:
                install_adapters(chunk, arch, groups.tp)
        bf16 = self.config.bf16  # inside; a chunk's inputs and outputs are fp32
        self.modules = [Float16Module(self.config, chunk) if bf16 else chunk for chunk in self.chunks]

    def weights_loaded(self) -> None:
        """Call this after changing parameters from outside. Does nothing for a model without optimizer."""

    def with_routers(
        self, micro_batches: MicroBatches, **options: Any
    ) -> tuple[MicroBatches, RouterPasses | None]:
        """Return the micro-batches, each with a :class:`RouterPass` of these ``options``, and all passes, for
        the routers' reports; for a dense model, the micro-batches themselves and None."""
        if self.arch.experts is None:
            return micro_batches, None
        passes = RouterPasses(
            (RouterPass(**options) for _ in range(len(micro_batches))),
            self.groups,
            sequence=self.parallel.sequence,
            layers=self.layers,
            count=self.arch.num_layers,
        )
        return micro_batches.with_columns(router=passes), passes

    @torch.no_grad()
    def score(self, micro_batches: Sequence[MicroBatch], scoring: Scoring) -> list[Tensor]:
        """Return the log-probs [t] of each micro-batch's labels, on every pipeline stage: bit-identical to a
        training pass with the same weights and micro-batches. Collective."""
        scores = run_schedule(
            self.modules, micro_batches, scoring.forward_step, forward_only=True, collect_non_loss_data=True
        )
        pipeline = scoring.groups.pp
        if pipeline.size() == 1:
            return scores
        sizes = [batch.loss_mask.numel() for batch in micro_batches]
        last = dist.get_process_group_ranks(pipeline)[-1]
        if dist.get_rank() == last:
            flat = torch.cat(scores)
        else:
            parameter = next(self.modules[0].parameters())
            wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
            flat = torch.empty(sum(sizes), dtype=wide, device=parameter.device)
        dist.broadcast(flat, src=last, group=pipeline)
        return list(torch.split(flat, sizes))


class Policy(Model):
    """This rank's part of a model with its optimizer.

    Attributes:
        optimizer: Megatron's optimizer.
        optimizer_steps: optimizer steps taken so far.
        busy_seconds: time that this rank spent on its own micro-batches in :meth:`backward`, before the
            gradient reduction over data-parallel ranks; accumulates until the reader sets it to 0.
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
        recompute: bool = False,
        fp8: FP8 = BF16,
    ) -> None:
        super().__init__(arch, backend, groups, parallel=parallel, dtype=dtype, recompute=recompute, fp8=fp8)
        self._ddp = wrap_for_training(self.modules, self.config, parallel)
        self.modules = [*self._ddp]
        self._schedule = optimizer
        settings = OptimizerConfig(
            optimizer="adam",
            lr=optimizer.lr,
            min_lr=optimizer.lr_min,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.beta1,
            adam_beta2=optimizer.beta2,
            adam_eps=optimizer.eps,
            clip_grad=optimizer.clip_grad,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            use_distributed_optimizer=parallel.distributed_optimizer,
        )
        # Its shards are views of parameters. An autograd graph, which leads to the parameters' hooks and is
        # invisible to the garbage collector, would keep the model alive forever.
        with torch.no_grad():
            self.optimizer: MegatronOptimizer = get_megatron_optimizer(
                settings, self._ddp, use_gloo_process_groups=False
            )
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.restore_schedule(0)
        self.busy_seconds = 0.0
        self._began = 0.0
        self._reduce = self.config.finalize_model_grads_func
        self.config.finalize_model_grads_func = self._meet_and_reduce

    def _meet_and_reduce(self, *args: Any, **kwargs: Any) -> None:
        """Stop the clock, then run Megatron's gradient reduction; the schedule calls this at its end."""
        self.busy_seconds += self.backend.busy_seconds() - self._began
        self._reduce(*args, **kwargs)

    def weights_loaded(self) -> None:
        """Update the optimizer's fp32 copies of bf16 parameters, after changing parameters from outside."""
        self.optimizer.reload_model_params()

    def restore_schedule(self, optimizer_steps: int) -> None:
        """Set the learning-rate schedule to its state after ``optimizer_steps``."""
        self._scheduler = _learning_rates(self.optimizer, self._schedule)
        self._scheduler.step(increment=optimizer_steps)
        self.optimizer_steps = optimizer_steps

    def backward(self, micro_batches: Sequence[MicroBatch], loss: PolicyLoss) -> Totals:
        """Compute gradients of this rank's micro-batches, and reduce them for the optimizer. Every
        data-parallel rank needs the same number of micro-batches. Returns each metric's (sum, denominator)
        over all ranks. Collective."""
        self.zero_gradients()
        self._began = self.backend.busy_seconds()
        metrics = run_schedule(self._ddp, micro_batches, loss.forward_step, forward_only=False)
        for layer in (module for chunk in self.chunks for module in chunk.modules()):
            if isinstance(layer, MoELayer):
                # Its autograd graph would keep the model alive, see __init__.
                layer.token_dispatcher.probs = None
        totals = sum_metrics(metrics, group=self.groups.dp_cp) if metrics else {}
        return share(totals, group=self.groups.pp, source=-1)

    def zero_gradients(self) -> None:
        """Reset the gradients of :meth:`backward`."""
        for model in self._ddp:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def grad_norm(self) -> float:
        """Return the global norm of the gradients, before clipping; NaN on all ranks if it is not finite on
        any. Megatron's optimizers do not check this in fp32 and bf16. Collective."""
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        return math.nan if any_rank(not math.isfinite(norm), device=self.backend.device) else norm

    def step(self, totals: Totals, grad_norm: float) -> Update:
        """Update the weights, given the results of :meth:`backward` and :meth:`grad_norm`. Collective.

        Raises:
            TrainingError: on every rank, if the norm is not finite. The weights stay unchanged.
        """
        if not math.isfinite(grad_norm):
            raise TrainingError(
                f"optimizer step {self.optimizer_steps + 1}: the gradient is not finite. The weights were "
                "not updated"
            )
        # Before the update: Megatron's schedules start at 0, which would waste the first step of a warm-up.
        self._scheduler.step(increment=1)
        # As Megatron's own step, but with the known norm.
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        clip_grad_by_total_norm_fp32(parameters, self._schedule.clip_grad, grad_norm)
        self.optimizer.step_with_ready_grads()
        self.optimizer_steps += 1
        rate = self.optimizer.param_groups[0]["lr"]
        return Update(totals=totals, grad_norm=grad_norm, learning_rate=rate)

    def skip(self, totals: Totals, grad_norm: float) -> Update:
        """Discard the gradients of :meth:`backward`; weights, optimizer and schedule stay unchanged.
        Arguments as in :meth:`step`."""
        self.zero_gradients()
        rate = self.optimizer.param_groups[0]["lr"]
        return Update(totals=totals, grad_norm=grad_norm, learning_rate=rate, skipped=True)

    def update(self, micro_batches: Sequence[MicroBatch], loss: PolicyLoss) -> Update:
        """Take one optimizer step: :meth:`backward`, :meth:`grad_norm`, :meth:`step`. Collective."""
        totals = self.backward(micro_batches, loss)
        return self.step(totals, self.grad_norm())

    def gather_gradients(self) -> None:
        """After :meth:`backward`, complete ``main_grad`` of every parameter, for inspection: with a
        distributed optimizer each rank has only its shard of the sum. Collective."""
        if not self.parallel.distributed_optimizer:
            return
        for model in self._ddp:
            for expert, buffers in ((False, model.buffers), (True, model.expert_parallel_buffers)):
                group = self.groups.copies(expert=expert)
                for bucket in (bucket for buffer in buffers for bucket in buffer.buckets):
                    shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                    dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)


def run_schedule(
    models: Sequence[Module], micro_batches: Sequence[MicroBatch], forward_step: Any, **flags: Any
) -> list[Any]:
    """Run one pass of Megatron's schedule over this rank's model chunks; return the loss function's results
    on the last pipeline stage. Collective."""
    collected: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micro_batches) for _ in models] if len(models) > 1 else iter(micro_batches),
        model=list(models),
        num_microbatches=len(micro_batches),
        # Unused: variable_seq_lengths sends the shapes of pipeline messages.
        seq_length=1,
        micro_batch_size=1,
        **flags,
    )
    return collected


def _learning_rates(optimizer: MegatronOptimizer, schedule: options.Optimizer) -> OptimizerParamScheduler:
    """Create the schedule of learning rates, at its start."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=schedule.lr,
        min_lr=schedule.lr_min,
        lr_warmup_steps=schedule.warmup_steps,
        lr_decay_steps=schedule.lr_decay_steps or schedule.warmup_steps + 1,
        lr_decay_style=schedule.lr_decay,
        start_wd=schedule.weight_decay,
        end_wd=schedule.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )
