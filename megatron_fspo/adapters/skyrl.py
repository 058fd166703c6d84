"""FSPO as a policy loss of SkyRL; import this file before the run starts, to register it::

    import megatron_fspo.adapters.skyrl                         # in the program that starts the run
    trainer.algorithm.policy_loss_type=fspo trainer.algorithm.loss_reduction=sequence_mean
    trainer.algorithm.eps_clip_low=0.03 trainer.algorithm.eps_clip_high=0.03

Checked with SkyRL 0.4.

* ``eps_clip_low`` and ``eps_clip_high`` are c_low and c_high, in nats per √token; c_dual is 2·c_high.
* SkyRL's losses return a sum; with ``sequence_mean``, its advantages are already divided by N·L. J is
  proportional to the size of A, so passing L·A yields J/N. N includes responses without tokens.
* ``off_policy_correction`` is refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from torch import Tensor

from megatron_fspo.adapters.sequence_loss import log_ratio_sums, make_fspo, mean_loss, metrics, one_advantage


def fspo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    *,
    centred: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Return −Σ J_i / N of one micro-batch, and metrics.

    Args:
        log_probs: [n, T] with its graph.
        old_log_probs: [n, T].
        advantages: [n, T], A / (N·L) on all tokens of a response.
        config: SkyRL's section ``trainer.algorithm``.
        loss_mask: [n, T].
        rollout_logprobs: unused.
        centred: for long responses, as ``policy_loss_type=fspo_centred`` sets it.

    Raises:
        ValueError: an invalid limit, or SkyRL's default for a ratio; another ``loss_reduction``; an
            ``off_policy_correction``; advantages that differ within a response.
    """
    limits = {"eps_clip_low": config.eps_clip_low, "eps_clip_high": config.eps_clip_high}
    fspo = make_fspo(limits, "SkyRL", centred=centred)
    if config.loss_reduction != "sequence_mean":
        raise ValueError(
            f"loss_reduction = {config.loss_reduction!r} is not supported with FSPO, a mean over sequences: "
            "set it to 'sequence_mean'"
        )
    correction = config.off_policy_correction
    if correction != type(correction)():
        raise ValueError("off_policy_correction is not supported with FSPO: leave it at its defaults")
    mask = torch.ones_like(log_probs, dtype=torch.bool) if loss_mask is None else loss_mask > 0
    lengths = mask.sum(dim=1)
    log_ratio_sum = log_ratio_sums(log_probs, old_log_probs, mask)
    shares = lengths * one_advantage(advantages, mask).to(log_ratio_sum)
    terms = fspo.surrogate(log_ratio_sum, lengths, shares)
    rates = metrics(log_ratio_sum.detach(), lengths, terms)
    # SkyRL reduces metrics over ranks key by key, so a key that only some ranks have would mix up the others.
    rates.pop("fspo/sigma_hat", None)
    return mean_loss(log_ratio_sum, terms, 1.0), rates


if "fspo" not in PolicyLossRegistry.list_available():
    PolicyLossRegistry.register("fspo", fspo_policy_loss)
    PolicyLossRegistry.register("fspo_centred", partial(fspo_policy_loss, centred=True))
