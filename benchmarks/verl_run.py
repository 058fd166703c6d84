"""The side of :mod:`against_trl` that verl's FSDP engine runs, in verl's own environment: an actor's update.

verl has the engine for GPUs; a platform, its way to add devices, gives it a CPU and gloo. Strategy fsdp2, as
FSDP 1 wants a GPU to send weights to other ranks; no recomputing, and weights are gathered once per pass.
Packed, with the attention of :mod:`plain_run` where GPUs have FlashAttention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig

from plain_run import Response, Step, job_file, measure, size_of

SINGLE = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def batch_of(responses: Sequence[Response], options: Mapping[str, Any], **more: Any) -> Any:
    """This rank's part of a mini-batch as the engine takes it."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    columns = {
        "input_ids": [torch.cat(one) for one in responses],
        "position_ids": [torch.arange(size_of(one)) for one in responses],
        "loss_mask": [(torch.arange(size_of(one)) >= len(one[0])).float() for one in responses],
        "prompts": [prompt for prompt, _ in responses],
        "responses": [response for _, response in responses],
        "response_mask": [torch.ones(len(response)) for _, response in responses],
        "advantages": [torch.ones(len(response)) for _, response in responses],
    }
    nested = {
        name: torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
        for name, rows in (columns | more).items()
    }
    data = TensorDict(nested, batch_size=len(responses))
    tensordict_utils.assign_non_tensor(data, **options)
    return data


def verl(job: Mapping[str, Any]) -> Step:
    """Of an engine in float32."""
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class PlatformCPU(PlatformCUDA):
        device_name = "cpu"
        device_module = torch.cpu

        def current_device(self) -> str:
            return "cpu"

    set_platform(PlatformCPU())
    from verl.trainer.config import CheckpointConfig
    from verl.workers import config
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.utils.losses import ppo_loss

    # Holding no logits is faster where the vocabulary is small (make-sum), and slower elsewhere (SmolLM2).
    fused = AutoConfig.from_pretrained(job["model"]).vocab_size < 4096
    options = {"temperature": 1.0, "use_fused_kernels": fused}
    options |= {"max_token_len_per_gpu": job["max_tokens"], "global_batch_size": job["batch"]}
    engine = FSDPEngineWithLMHead(
        config.HFModelConfig(
            path=job["model"],
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "alone"},
            use_fused_kernels=fused,
            fused_kernel_options={"impl_backend": "torch"},
        ),
        config.FSDPEngineConfig(strategy="fsdp2", reshard_after_forward=False, mixed_precision=SINGLE),
        config.FSDPOptimizerConfig(lr=job["lr"], total_training_steps=1),
        CheckpointConfig(),
    )
    engine.initialize()
    actor = config.FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=config.PolicyLossConfig(loss_mode="gspo"),
        loss_agg_mode="seq-mean-token-mean",
    )
    loss = partial(ppo_loss, actor)

    def old_pass(responses: Sequence[Response]) -> Any:
        rows = engine.infer_batch(batch_of(responses, options))["model_output"]["log_probs"]
        return [row[len(one[0]) - 1 : -1] for row, one in zip(rows.unbind(), responses, strict=True)]

    def step(batches: Sequence[Sequence[Response]]) -> None:
        with engine.eval_mode():
            old = [old_pass(responses) for responses in batches]
        with engine.train_mode():
            for responses, before in [*zip(batches, old, strict=True)] * job["epochs"]:
                engine.train_batch(batch_of(responses, options, old_log_probs=before), loss)

    return step


if __name__ == "__main__":
    measure(verl, job_file(__doc__))
