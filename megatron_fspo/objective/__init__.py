"""FSPO in pure torch: clip bands, surrogates, advantages, length fairness.

FSPO makes one clip decision per response. For a response of L tokens with advantage A::

    S = Σ_t (log π(y_t) − log π_old(y_t))    # log importance ratio, a sum and not a mean (second-hand)
    −c_low·√L <= S <= c_high·√L              # the band (paper): random differences spread S as √L
    J = min(e^S·A, e^clip(S)·A)              # PPO's minimum (second-hand); loss = −mean(J)

Nothing here depends on Megatron, process groups or a model, so any trainer can use it::

    >>> import torch
    >>> from megatron_fspo.objective import FSPOBand, leave_one_out_advantages, sequence_surrogate
    >>> rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0]])               # one prompt, four responses
    >>> lengths = torch.tensor([4, 2, 3, 1])                         # L, response tokens
    >>> mask = torch.arange(4) < lengths[:, None]                    # from lengths, never from ids != pad
    >>> old = torch.full((4, 4), -1.0)                               # log π_old(y_t)
    >>> new = (old + torch.tensor([[0.1], [0.01], [-0.1], [0.0]])).requires_grad_()
    >>> log_ratio_sum = torch.where(mask, new - old, 0.0).sum(dim=1)  # S
    >>> advantages = leave_one_out_advantages(rewards).flatten()
    >>> result = sequence_surrogate(log_ratio_sum, lengths, advantages, FSPOBand(c_low=0.05, c_high=0.05))
    >>> (-(result.weight * log_ratio_sum).sum() / 4).backward()      # the gradient of −mean(result.objective)
    >>> result.clipped.tolist()                                      # S = 0.4 > 0.1 and S = −0.3 < −0.087
    [True, False, True, False]
    >>> new.grad.abs().sum(dim=1).gt(0).tolist()
    [False, True, False, True]

Import ``calibration``, ``noise`` and ``correction`` from their modules. Docstrings name the source of each
formula: the paper (arXiv 2509.09177, of which we know the abstracts), second-hand, or ours.
"""

from megatron_fspo.objective.advantages import group_normalized_advantages, leave_one_out_advantages
from megatron_fspo.objective.band import (
    ClipBand,
    ConstantDualClip,
    DualClip,
    FSPOBand,
    GSPOBand,
    LengthFairDualClip,
    RLOOBand,
)
from megatron_fspo.objective.fairness import (
    LengthBin,
    LengthReweightingError,
    effective_sample_size,
    length_reweighting_error,
)
from megatron_fspo.objective.surrogate import (
    PolicyObjective,
    SequenceLevel,
    Surrogate,
    sequence_surrogate,
    unclipped,
)

__all__ = [
    "ClipBand",
    "ConstantDualClip",
    "DualClip",
    "FSPOBand",
    "GSPOBand",
    "LengthBin",
    "LengthFairDualClip",
    "LengthReweightingError",
    "PolicyObjective",
    "RLOOBand",
    "SequenceLevel",
    "Surrogate",
    "effective_sample_size",
    "group_normalized_advantages",
    "leave_one_out_advantages",
    "length_reweighting_error",
    "sequence_surrogate",
    "unclipped",
]
