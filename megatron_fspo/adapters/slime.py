"""FSPO as a custom loss of slime, whose flags name this function::

    --loss-type custom_loss --custom-loss-function-path megatron_fspo.adapters.slime.fspo_loss
    --eps-clip 0.03 --eps-clip-high 0.03

Checked with slime at 624b824.

* ``--eps-clip`` and ``--eps-clip-high`` are c_low and c_high, in nats per √token, and ``--eps-clip-c`` is
  c_dual, by default 2·c_high.
* Under context parallelism, each rank has two chunks of every response. S is summed over the ranks, with one
  all-reduce of one number per response; each rank's loss has the gradient of its own tokens.
* N is slime's global batch size, which counts rollouts: slime divides the returned sum by it and undoes
  Megatron's means. A rollout of several samples counts once, with the sum of their J.
* Flags for other terms of slime's own loss are refused, because a custom loss would silently ignore them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp
from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, get_rollout_top_p_logprob_kwargs
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_fspo.adapters.sequence_loss import (
    advantage_range,
    flags,
    log_ratio_sums,
    make_fspo,
    mean_loss,
    the_advantage,
)

_OTHERS = {
    "calculate_per_token_loss": "it divides by tokens, and FSPO is a mean over responses",
    "use_kl_loss": "this loss has no KL term",
    "entropy_coef": "this loss has no entropy term",
    "use_tis": "S has no correction for the sampler",
    "get_mismatch_metrics": "S has no correction for the sampler",
    "use_opsm": "it drops responses by their mean log-ratio",
    "custom_pg_loss_reducer_function_path": "FSPO is a mean over responses",
}
"""Flags of slime's own policy loss, and the reasons to refuse them."""


def fspo_loss(
    args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Any, *, centred: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return −Σ J_i of one micro-batch, as this rank's contribution, and metrics. Collective.

    Args:
        args: slime's flags.
        batch: tokens, lengths, masks, advantages and old log-probs of n responses.
        logits: [1, T, V] of this rank's tokens, float32.
        sum_of_sample_mean: slime's mean over tokens, unused.
        centred: for long responses, as ``fspo_centred_loss`` sets it.

    Raises:
        ValueError: an invalid limit, or slime's default for a ratio; a flag that FSPO does not support;
            advantages that differ within a response.
    """
    for name, why in _OTHERS.items():
        if getattr(args, name, None):
            raise ValueError(f"--{name.replace('_', '-')} is not supported with FSPO: {why}")
    limits = {"--eps-clip": args.eps_clip, "--eps-clip-high": args.eps_clip_high}
    fspo = make_fspo(limits, "slime", args.eps_clip_c, centred=centred)
    lengths = torch.stack([mask.sum() for mask in batch["loss_masks"]]).to(logits.device)
    # Log-probs of the response tokens on this rank, by response.
    _, columns = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        **get_rollout_top_p_logprob_kwargs(args, batch),
    )
    old = batch["rollout_log_probs"] if args.use_rollout_logprobs else batch.get("log_probs")
    parts = zip(batch["loss_masks"], batch["total_lengths"], batch["response_lengths"], strict=True)
    mask = _padded([slice_log_prob_with_cp(*part).to(logits.device) > 0 for part in parts])
    # In float64, so that clip decisions do not depend on the split over ranks.
    new = _padded(columns["log_probs"]).double()
    # slime omits old log-probs if no update has moved the policy yet.
    log_ratio_sum = log_ratio_sums(new, _padded(old).double() if old else new, mask)
    whole, advantages = _over_ranks(log_ratio_sum.detach(), _padded(batch["advantages"]), mask, lengths)
    terms = fspo.surrogate(whole, lengths, advantages)
    sums = {"loss": -terms.objective, **flags(terms)}
    # slime also sums these over context-parallel ranks, each of which has the full value.
    ranks = mpu.get_context_parallel_world_size()
    return (
        mean_loss(log_ratio_sum, terms, 1.0).to(logits.dtype),
        {name: (value.float().sum() / ranks).detach() for name, value in sums.items()},
    )


fspo_centred_loss = partial(fspo_loss, centred=True)


def _padded(parts: list[Tensor]) -> Tensor:
    """Pad to [n, longest], with at least one column."""
    empty = parts[0].new_zeros(1)
    return pad_sequence([empty, *parts], batch_first=True)[1:]


def _over_ranks(
    log_ratio_sum: Tensor, advantages: Tensor, mask: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Return S and A [n] of whole responses, over all context-parallel ranks, which get the same values."""
    total = log_ratio_sum.clone()
    lowest, highest = advantage_range(advantages.to(total), mask)
    if mpu.get_context_parallel_world_size() > 1:
        group = mpu.get_context_parallel_group()
        limits = torch.stack([-lowest, highest])
        dist.all_reduce(total, group=group)
        dist.all_reduce(limits, op=dist.ReduceOp.MAX, group=group)
        lowest, highest = -limits[0], limits[1]
    return total, the_advantage(lowest, highest, lengths > 0)
