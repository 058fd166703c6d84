"""The scale factor T/N between Megatron's normalization and ours, and the code that makes it necessary.

For every split of an optimizer step into ranks, micro-batches and packs we want::

    gradient = -(1/N) Σ_i ∇J_i        N: sequences of the whole step, over all ranks

With ``calculate_per_token_loss=True`` and a loss function that returns ``(loss, num_tokens, metrics)``,
Megatron does this (paths in megatron-core 0.16.1):

- ``pipeline_parallel/schedules.py``, ``forward_step_calc_loss``: leaves ``loss`` unscaled (with the flag
  off it would divide by this micro-batch's tokens and by the number of micro-batches);
- ``distributed/distributed_data_parallel.py``: *sums* gradients over data × context parallel ranks (with
  the flag off it would average);
- ``distributed/finalize_model_grads.py``: sums ``num_tokens`` over micro-batches and data × context
  parallel ranks into T, and divides every gradient by T.

``num_tokens`` must be an integer, which mixture-of-experts routers read as a token count. So we return each
rank's own valid tokens, and multiply the loss by T / N, both known before the step, to undo the division.
"""

from __future__ import annotations

from torch import Tensor

from megatron_fspo.packing.batch import StepTotals


def megatron_loss(objective: Tensor, totals: StepTotals) -> Tensor:
    """Turn Σ J of this micro-batch into a loss whose accumulated gradient, divided by T, is -(1/N) Σ ∇J.

    Args:
        objective: [] with gradient.
        totals: N counts all sequences of the step with a response; without any, N and the objective are 0. T
            counts packed tokens only: sequences without a gradient may be in no pack.
    """
    return -objective * (totals.packed_tokens / max(totals.num_sequences, 1))
