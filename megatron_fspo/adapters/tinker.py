"""FSPO for Tinker, and for services with its API: a function for ``forward_backward_custom``::

    from megatron_fspo.adapters.tinker import fspo_loss

    training_client.forward_backward_custom(data, fspo_loss())

The client differentiates it with respect to the log-probs and has the server backpropagate exactly those
numbers, which are FSPO's weights over −N: nothing is lost to the linearisation. Seen with tinker 0.38.

Each datum is one response, in tensors of equal length as the cookbook's RL data have them in
``loss_fn_inputs``: ``target_tokens``; ``logprobs`` of the sampler; ``advantages``, the same on all tokens of
the response; ``mask``, 1 for these. S starts from the sampler, as that service's own losses do.
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
    num_sequences: int | None = None,
) -> TinkerLoss:
    """The loss of one ``forward_backward_custom``: (data, log-probs) → (loss, metrics).

    Args:
        c_low: nats per √token, as in :class:`~megatron_fspo.adapters.sequence_loss.FSPO`.
        c_high: the same.
        c_dual: the same.
        num_sequences: N, where one ``optim_step`` follows several calls: responses of all of them. By
            default those of the call.

    Raises:
        ValueError: a limit that is not legal; in the call: a datum without one of the four tensors, of other
            lengths than its log-probs, or whose tokens differ in advantage.
    """
    fspo = FSPO(c_low=c_low, c_high=c_high, c_dual=c_dual)

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
            f"datum {number}: {name} has shape {[*value.shape]}, its log-probs {[*log_probs.shape]}"
        )
    return value.to(log_probs.dtype)
