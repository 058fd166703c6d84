"""FSPO as a custom loss of slime; flags name this function::

    --loss-type custom_loss --custom-loss-function-path megatron_fspo.adapters.slime.fspo_loss
    --eps-clip 0.03 --eps-clip-high 0.03

Seen with slime at 624b824.

* ``--eps-clip`` and ``--eps-clip-high`` are c_low and c_high, in nats per √token, and ``--eps-clip-c`` is
  c_dual; without it that is 2·c_high.
* Under context parallelism the function sees two chunks of every response: S is added up over the ranks, one
  all-reduce of one number for each response, and each rank's loss has the gradient of its own tokens.
* N is slime's global batch size, which counts rollouts: it divides what the function returns by that, and
  undoes Megatron's means. A rollout of several samples counts once, and so has the sum of their J.
* Flags of other terms of slime's own loss are refused: a custom loss would leave them out silently.
"""

from __future__ import annotations

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
    limits_of,
    log_ratio_sums,
    mean_loss,
    the_advantage,
)

_OTHERS = {
    "calculate_per_token_loss": "its gradient is divided by tokens, and FSPO is a mean over responses",
    "use_kl_loss": "there is no KL term here",
    "entropy_coef": "there is no entropy term here",
    "use_tis": "S has no correction for the sampler",
    "get_mismatch_metrics": "S has no correction for the sampler",
    "use_opsm": "it drops responses by their mean log-ratio",
    "custom_pg_loss_reducer_function_path": "the mean is over responses",
}
"""Flags of slime's own policy loss, and why they are refused."""


def fspo_loss(
    args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """−Σ J_i of one micro-batch, as this rank's part, and metrics.

    Args:
        args: slime's flags.
        batch: tokens, lengths, masks, advantages and old log-probs of n responses.
        logits: [1, T, V] of this rank's tokens, float32.
        sum_of_sample_mean: slime's mean over tokens, of no effect here.

    Raises:
        ValueError: a limit that is not legal, or slime's default for a ratio; a flag that does not go with
            FSPO; advantages that differ within a response.
    """
    for name, why in _OTHERS.items():
        if getattr(args, name, None):
            raise ValueError(f"--{name.replace('_', '-')} does not go with FSPO: {why}")
    limits = {"--eps-clip": args.eps_clip, "--eps-clip-high": args.eps_clip_high}
    fspo = limits_of(limits, "slime", args.eps_clip_c)
    lengths = torch.stack([mask.sum() for mask in batch["loss_masks"]]).to(logits.device)
    # Of the response tokens that this rank has, by response.
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
    mask = _padded([slice_log_prob_with_cp(*one).to(logits.device) > 0 for one in parts])
    # In float64, so that a split over ranks does not decide what is clipped.
    new = _padded(columns["log_probs"]).double()
    # slime leaves them out where nothing has moved the policy yet.
    log_ratio_sum = log_ratio_sums(new, _padded(old).double() if old else new, mask)
    whole, advantages = _over_ranks(log_ratio_sum.detach(), _padded(batch["advantages"]), mask, lengths)
    terms = fspo.surrogate(whole, lengths, advantages)
    sums = {"loss": -terms.objective, **flags(terms)}
    # slime adds these up over context ranks, too, of which each has them whole.
    ranks = mpu.get_context_parallel_world_size()
    return (
        mean_loss(log_ratio_sum, terms, 1.0).to(logits.dtype),
        {name: (value.float().sum() / ranks).detach() for name, value in sums.items()},
    )


def _padded(parts: list[Tensor]) -> Tensor:
    """[n, longest], of at least one column."""
    empty = parts[0].new_zeros(1)
    return pad_sequence([empty, *parts], batch_first=True)[1:]


def _over_ranks(
    log_ratio_sum: Tensor, advantages: Tensor, mask: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """S and A [n] of whole responses: those of the context ranks together, the same on all of them."""
    total = log_ratio_sum.clone()
    lowest, highest = advantage_range(advantages.to(total), mask)
    if mpu.get_context_parallel_world_size() > 1:
        group = mpu.get_context_parallel_group()
        limits = torch.stack([-lowest, highest])
        dist.all_reduce(total, group=group)
        dist.all_reduce(limits, op=dist.ReduceOp.MAX, group=group)
        lowest, highest = -limits[0], limits[1]
    return total, the_advantage(lowest, highest, lengths > 0)
