"""One optimizer step of a table of logits by slime's own loss, on every rank of a layout.

Each rank writes its gradient, averaged like Megatron's, and the metrics that slime would report, to
``<out>/<rank>.pt``. The batch and which rank has which responses are in ``batch.pt``.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp, slice_with_cp
from slime.backends.megatron_utils.loss import loss_function
from slime.observability.train_metric_utils import reduce_train_step_metrics
from torch import Tensor


def flags(**changed: Any) -> Namespace:
    """What slime's loss reads, with its defaults but for FSPO's."""
    given = {
        "loss_type": "custom_loss",
        "custom_loss_function_path": "megatron_fspo.adapters.slime.fspo_loss",
        "eps_clip": 0.05,
        "eps_clip_high": 0.04,
        "eps_clip_c": None,
        "calculate_per_token_loss": False,
        "use_rollout_logprobs": False,
        "use_kl_loss": False,
        "entropy_coef": 0.0,
        "use_tis": False,
        "get_mismatch_metrics": False,
        "use_opsm": False,
        "recompute_loss_function": False,
        "allgather_cp": False,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "log_probs_chunk_size": -1,
    }
    return Namespace(**(given | changed))


def micro_batch(responses: list[dict[str, Any]], table: Tensor) -> tuple[dict[str, Any], Tensor]:
    """slime's batch of some responses, and the logits of the tokens that this rank has [1, T, V]."""
    totals = [len(one["tokens"]) for one in responses]
    lengths = [len(one["old"]) for one in responses]
    local = torch.cat([slice_with_cp(one["tokens"], 0) for one in responses])

    def sliced(name: str) -> list[Tensor]:
        columns = zip((one[name] for one in responses), totals, lengths, strict=True)
        return [slice_log_prob_with_cp(*one) for one in columns]

    batch = {
        "unconcat_tokens": [one["tokens"] for one in responses],
        "total_lengths": totals,
        "response_lengths": lengths,
        "loss_masks": [one["mask"] for one in responses],
        "rollout_mask_sums": None,
        "log_probs": sliced("old"),
        "advantages": sliced("advantages"),
    }
    return batch, table[local][None]


def step(out: Path, context: int, micro_batches: int) -> None:
    """The whole step: this rank's responses in micro-batches, as Megatron's schedule adds them up."""
    responses: list[dict[str, Any]] = torch.load(out / "batch.pt", weights_only=True)
    table = torch.load(out / "table.pt", weights_only=True).requires_grad_()
    data, rank = dist.get_world_size() // context, mpu.get_data_parallel_rank()
    mine = responses[rank * len(responses) // data : (rank + 1) * len(responses) // data]
    logged = []
    for part in range(micro_batches):
        batch, logits = micro_batch(mine[part::micro_batches], table)
        loss, _, metrics = loss_function(flags(), batch, micro_batches, len(responses), logits)
        (loss / micro_batches).backward()
        logged.append(metrics)
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(table.grad, group=group)
    found = reduce_train_step_metrics(
        logged,
        calculate_per_token_loss=False,
        step_global_batch_size=len(responses),
        cp_size=context,
        dp_with_cp_group=group,
    )
    saved = {"gradient": table.grad / dist.get_world_size(group), "metrics": found}
    torch.save(saved, out / f"{dist.get_rank()}.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo", world_size=int(os.environ["WORLD_SIZE"]), rank=int(os.environ["RANK"]))
    mpu.initialize_model_parallel(context_parallel_size=int(sys.argv[2]))
    step(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    dist.destroy_process_group()
