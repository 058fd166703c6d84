"""The only scale factors of the loss, each with the line of Megatron it answers.

What we want, for every split of an optimizer step into ranks, micro-batches and packs::

    gradient = -(1/N) Σ_i ∇J_i        N: sequences of the whole step, over all ranks

What Megatron does with ``calculate_per_token_loss=True`` and a loss function that returns
``(loss, num_tokens, metrics)`` (paths in megatron-core 0.16.1):

- ``pipeline_parallel/schedules.py``, ``forward_step_calc_loss``: leaves ``loss`` as it is (with the flag
  off it would divide by this micro-batch's tokens and by the number of micro-batches);
- ``distributed/distributed_data_parallel.py``: *sums* gradients over data × context parallel ranks (with
  the flag off it would average);
- ``distributed/finalize_model_grads.py``: sums ``num_tokens`` over micro-batches and data × context
  parallel ranks into T, and divides every gradient by T.

T is an *integer*, and a mixture-of-experts router takes it for a token count. So we return each rank's own
valid tokens as ``num_tokens`` and undo the division by the factor T / N, both known before the step.
"""

from __future__ import annotations

from torch import Tensor

from megatron_fspo.packing.batch import StepTotals


def megatron_loss(objective: Tensor, totals: StepTotals) -> Tensor:
    """Σ J over this micro-batch → the loss whose accumulated, T-divided gradient is -(1/N) Σ ∇J.

    Args:
        objective: [] with gradient.
        totals: N counts every sequence of the step that has a response; a step without any has N = 0, and its
            objective is 0. T is what is in packs: sequences without a gradient may be in none.
    """
    return -objective * (totals.packed_tokens / max(totals.num_sequences, 1))
