"""FSPO in your own Megatron-Core loop, without our trainer, configuration and rollout engine.

    torchrun --nproc-per-node 2 examples/plugin_only/train.py
    torchrun --nproc-per-node 4 examples/plugin_only/train.py --tensor 2 --pipeline 2

The loop is that of any Megatron program: a GPTModel, DistributedDataParallel, an optimizer and the schedule.
FSPO needs only the three numbered places. The responses are random and the reward prefers even tokens, so the
log-probability of even tokens rises.
"""

from __future__ import annotations

import argparse
import random

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fspo.mcore.machine.backend import choose_backend
from megatron_fspo.mcore.model.layers import block_spec
from megatron_fspo.objective import (
    FSPOBand,
    LengthFairDualClip,
    SequenceLevel,
    leave_one_out_advantages,
)
from megatron_fspo.plugin import (
    MicroBatches,
    PackLayout,
    ParallelGroups,
    PolicyLoss,
    Scoring,
    Sequences,
    pack,
)

VOCAB, PROMPTS, RESPONSES, STEPS = 32, 8, 4, 6


def build(tensor: int, pipeline: int) -> DistributedDataParallel:
    """Build this rank's shard of a small random model, in place of yours."""
    backend = choose_backend(layers="local")
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=128,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,  # packs differ in length; Megatron then requires the next line
        moe_token_dispatcher_type="alltoall",
        # 1: gradients are summed over ranks and divided by the step's tokens, as the loss expects.
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
        **backend.config_flags(),
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(backend, config),
        vocab_size=VOCAB,
        max_sequence_length=64,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model.to(backend.device))


def random_sequences(step: int) -> Sequences:
    """Make random responses of 1 to 24 tokens, rewarded by their share of even ones, in place of rollouts."""
    rng = random.Random(step)
    responses = [
        [rng.randrange(VOCAB) for _ in range(rng.randint(1, 24))] for _ in range(PROMPTS * RESPONSES)
    ]
    rewards = torch.tensor([sum(token % 2 == 0 for token in ids) / len(ids) for ids in responses])
    return Sequences.of(
        prompts=[[i // RESPONSES, i // RESPONSES + 1] for i in range(len(responses))],
        responses=responses,
        advantages=leave_one_out_advantages(rewards.view(PROMPTS, RESPONSES)).flatten(),
    )


def run(model: DistributedDataParallel, batches: MicroBatches, forward_step, **flags):
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=1,
        micro_batch_size=1,
        **flags,
    )


def main(tensor: int, pipeline: int) -> None:
    choose_backend(layers="local").install()
    dist.init_process_group(choose_backend(layers="local").collectives)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline
    )
    torch.manual_seed(1)
    model = build(tensor, pipeline)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=3e-3, clip_grad=1.0), [model])

    # 2: the loss, with the process groups that it reduces over.
    groups = ParallelGroups.of(parallel_state)
    scoring = Scoring(groups=groups, vocab_size=VOCAB, temperature=1.0)
    band = FSPOBand(c_low=0.05, c_high=0.05)
    loss = PolicyLoss(
        objective=SequenceLevel(band=band, dual_clip=LengthFairDualClip(c=0.1)), scoring=scoring
    )

    # 3: packed micro-batches, which have N and T of the whole step.
    layout = PackLayout(
        max_tokens=256,
        data_rank=groups.dp.rank(),
        data_size=groups.dp.size(),
        device=next(model.parameters()).device,
    )
    for step in range(STEPS):
        batches = pack(random_sequences(step), layout)
        with torch.no_grad():
            old = run(model, batches, scoring.forward_step, forward_only=True, collect_non_loss_data=True)
        has_loss = parallel_state.is_pipeline_last_stage()  # other stages get nothing from the schedule
        if has_loss:
            batches = batches.with_columns(old_log_probs=old)
        for _ in range(2):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            metrics = run(model, batches, loss.forward_step, forward_only=False)
            _, grad_norm, _ = optimizer.step()
        if has_loss:
            j = -mean(torch.stack([m["actor/pg_loss"] for m in metrics]).sum(0), groups)
            gap = even_gap(batches, old, groups)
            if groups.dp.rank() == groups.tp.rank() == 0:
                print(f"step {step}  J {j:+.4f}  gradient norm {grad_norm:.3f}  even gap {gap:+.3f}")
    dist.destroy_process_group()


def mean(pair: torch.Tensor, groups: ParallelGroups) -> float:
    """Reduce (sum, denominator) over data- and context-parallel ranks and return the mean. Collective."""
    dist.all_reduce(pair, group=groups.dp_cp)
    return (pair[0] / pair[1]).item()


def even_gap(batches: MicroBatches, log_probs: list[torch.Tensor], groups: ParallelGroups) -> float:
    """Return the mean log-prob of even response tokens minus that of odd ones, before the step's updates."""
    values = torch.cat([lp[b.loss_mask] for b, lp in zip(batches, log_probs, strict=True)])
    even = torch.cat([b.labels[b.loss_mask] for b in batches]) % 2 == 0
    means = [mean(torch.stack([values[which].sum(), which.sum()]), groups) for which in (even, ~even)]
    return means[0] - means[1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The remaining ranks are data parallel.")
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    main(**vars(parser.parse_args()))
