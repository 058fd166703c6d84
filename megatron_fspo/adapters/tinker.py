"""FSPO for Tinker and services with its API: a function for ``forward_backward_custom``::

    from megatron_fspo.adapters.tinker import fspo_loss

    training_client.forward_backward_custom(data, fspo_loss())

The client differentiates the loss with respect to the log-probs and sends the server these derivatives,
FSPO's weights over −N, to backpropagate. This linearisation is exact. Checked with tinker 0.38.

Each datum is one response. Its ``loss_fn_inputs`` has tensors of equal length, as in the cookbook's RL data:
``target_tokens``; ``logprobs`` of the sampler; ``advantages``, the same on all tokens of the response;
``mask``, 1 for these tokens. S starts from the sampler, as in the service's own losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_fspo.adapters.sequence_loss import FSPO, log_ratio_sums, mean_loss, metrics, one_advantage
from megatron_fspo.objective.band import DEFAULT_C

TinkerLoss = Callable[[Sequence[Any], list[Tensor]], tuple[Tensor, dict[str, float]]]


def fspo_loss(
    *,
    c_low: float = DEFAULT_C,
    c_high: float = DEFAULT_C,
    c_dual: float | None = None,
    centred: bool = False,
    num_sequences: int | None = None,
) -> TinkerLoss:
    """Return the loss for ``forward_backward_custom``: (data, log-probs) → (loss, metrics).

    Args:
        c_low: nats per √token; see :class:`~megatron_fspo.adapters.sequence_loss.FSPO`.
        c_high: the same.
        c_dual: the same.
        centred: the same.
        num_sequences: N, if one ``optim_step`` follows several calls: the responses of all of them. By
            default, those of the call.

    Raises:
        ValueError: an invalid limit; in the call: a datum without one of the tensors, with a tensor and
            log-probs of different lengths, or with advantages that differ within the response.
    """
    fspo = FSPO(c_low=c_low, c_high=c_high, c_dual=c_dual, centred=centred)

    def evaluate(data: Sequence[Any], log_probs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        old, advantages, mask = (
            pad_sequence(
                [
                    _tensor(datum.loss_fn_inputs, name, row, number)
                    for number, (datum, row) in enumerate(zip(data, log_probs, strict=True))
                ],
                batch_first=True,
            )
            for name in ("logprobs", "advantages", "mask")
        )
        mask = mask > 0
        lengths = mask.sum(dim=1)
        log_ratio_sum = log_ratio_sums(pad_sequence(log_probs, batch_first=True), old, mask)
        terms = fspo.surrogate(log_ratio_sum, lengths, one_advantage(advantages, mask))
        count = int((lengths > 0).sum()) if num_sequences is None else num_sequences
        loss = mean_loss(log_ratio_sum, terms, max(count, 1))
        return loss, metrics(log_ratio_sum.detach(), lengths, terms)

    return evaluate


def _tensor(inputs: Mapping[str, Any], name: str, log_probs: Tensor, number: int) -> Tensor:
    if name not in inputs:
        raise ValueError(f"datum {number} has no {name!r} in loss_fn_inputs, only {sorted(inputs)}")
    value: Tensor = inputs[name].to_torch()
    if value.shape != log_probs.shape:
        raise ValueError(
            f"datum {number}: {name} has shape {[*value.shape]}, but its log-probs {[*log_probs.shape]}"
        )
    return value.to(log_probs.dtype)
