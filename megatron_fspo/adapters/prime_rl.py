"""FSPO as a custom loss of prime-rl, whose configuration names this function::

    [trainer.loss]
    type = "custom"
    import_path = "megatron_fspo.adapters.prime_rl.fspo_loss"
    kwargs = { c_low = 0.03, c_high = 0.03 }

Checked with prime-rl 0.8.

* S starts from the sampler's log-probs, like prime-rl's own ratios, so it includes mismatch and staleness;
  choose a band wide enough for both.
* prime-rl calls the function once per response and divides the sum by the *tokens* of the step. The gradient
  is FSPO's times one factor for the whole step, 1 / mean length. This does not change the weighting of
  lengths, but gradient-norm limits have another scale.
"""

from __future__ import annotations

from typing import Any

from prime_rl.trainer.rl.loss import LossOutputs

from megatron_fspo.adapters.sequence_loss import FSPO, flags, log_ratio_sums, mean_loss, one_advantage


def fspo_loss(
    inputs: Any, c_low: float, c_high: float, c_dual: float | None = None, *, centred: bool = False
) -> LossOutputs:
    """Return −J of one response, and its metrics.

    Args:
        inputs: prime-rl's ``LossInputs``: log-probs, advantages and mask, all [L].
        c_low: nats per √token.
        c_high: nats per √token.
        c_dual: default: 2·c_high.
        centred: for long responses; see :class:`~megatron_fspo.adapters.sequence_loss.FSPO`.

    Raises:
        ValueError: an invalid limit, advantages that differ within the response, or token weights.
    """
    weights, mask = inputs.loss_weights, inputs.loss_mask[None]
    if weights is not None and bool((weights[inputs.loss_mask] != 1).any()):
        raise ValueError("FSPO decides on whole responses and does not support weights of single tokens")
    lengths = mask.sum(dim=1)
    log_ratio_sum = log_ratio_sums(inputs.trainer_logprobs[None], inputs.inference_logprobs[None], mask)
    advantages = one_advantage(inputs.advantages[None], mask)
    fspo = FSPO(c_low=c_low, c_high=c_high, c_dual=c_dual, centred=centred)
    terms = fspo.surrogate(log_ratio_sum, lengths, advantages)
    # prime-rl averages metrics over responses.
    return LossOutputs(
        loss=mean_loss(log_ratio_sum, terms, 1.0),
        metrics={name: flag[0].float() for name, flag in flags(terms).items()},
    )
