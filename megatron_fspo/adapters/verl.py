"""FSPO as a policy loss of verl, registered when this file is imported, which verl does itself::

    actor_rollout_ref.actor.policy_loss.loss_mode=fspo
    actor_rollout_ref.actor.clip_ratio_low=0.03 actor_rollout_ref.actor.clip_ratio_high=0.03

verl imports it through an entry point of the group ``verl.plugins``. Checked with verl 0.9.1.

* ``clip_ratio_low`` and ``clip_ratio_high`` are c_low and c_high, in nats per √token; c_dual is 2·c_high.
* J is a mean over sequences, whatever ``loss_agg_mode`` says, which still applies to verl's entropy and KL
  terms. N is verl's ``global_batch_size``, which includes responses without tokens.
* ``algorithm.rollout_correction.bypass_mode`` replaces ``loss_mode`` by its own, so FSPO does not run there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import register_policy_loss

from megatron_fspo.adapters.sequence_loss import log_ratio_sums, make_fspo, mean_loss, metrics, one_advantage

_DUAL_RATIO = 3.0
"""verl's default, meant for a ratio."""


@register_policy_loss("fspo")
def fspo_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    *,
    centred: bool = False,
) -> tuple[Tensor, dict[str, Any]]:
    """Return −(1/N) Σ J_i of one micro-batch times the data-parallel size, and metrics for verl to average.

    Args:
        old_log_prob: [n, T].
        log_prob: [n, T] with its graph.
        advantages: [n, T], the same on all tokens of a response.
        response_mask: [n, T].
        loss_agg_mode: unused.
        config: the actor's, with ``global_batch_info`` as verl sets it before each micro-batch.
        rollout_is_weights: [n, T], factors on the gradients of tokens; they do not affect S and clips.
        centred: for long responses, as ``loss_mode=fspo_centred`` sets it.

    Raises:
        ValueError: an invalid limit, or verl's default for a ratio; advantages that differ within a response;
            several data-parallel ranks without ``global_batch_size``.
    """
    limits = {"clip_ratio_low": config.clip_ratio_low, "clip_ratio_high": config.clip_ratio_high}
    fspo = make_fspo(limits, "verl", centred=centred)
    if config.clip_ratio_c != _DUAL_RATIO:
        raise ValueError(
            f"clip_ratio_c = {config.clip_ratio_c} is a limit on a ratio, but FSPO's dual clip is "
            f"2 * clip_ratio_high; leave it at {_DUAL_RATIO}"
        )
    mask = response_mask > 0
    lengths = mask.sum(dim=1)
    log_ratio_sum = log_ratio_sums(log_prob, old_log_prob, mask)
    terms = fspo.surrogate(log_ratio_sum, lengths, one_advantage(advantages, mask).to(log_ratio_sum))
    moving = log_ratio_sum
    if rollout_is_weights is not None:
        moving = torch.where(mask, rollout_is_weights * (log_prob - log_prob.detach()), 0.0).sum(dim=1)
    info = config.global_batch_info
    ranks, count = info.get("dp_size", 1), info.get("global_batch_size")
    if count is None:
        if ranks > 1:
            raise ValueError(f"global_batch_size is not set, but there are {ranks} data-parallel ranks")
        count = max(int((lengths > 0).sum()), 1)
    # verl averages gradients over ranks and sums them over micro-batches.
    loss = mean_loss(moving, terms, float(count / ranks))

    shares: dict[str, Any] = metrics(log_ratio_sum.detach(), lengths, terms)
    tokens = max(int(lengths.sum()), 1)
    shares["actor/pg_clipfrac"] = sum(
        shares[name] for name in ("fspo/clip_low", "fspo/clip_high", "fspo/dual_clip_frac")
    )
    shares["actor/ppo_kl"] = -log_ratio_sum.detach().nan_to_num(0.0, 0.0, 0.0).sum().item() / tokens
    return loss, shares


register_policy_loss("fspo_centred")(partial(fspo_policy_loss, centred=True))
