"""Advantages from the rewards of a group: n responses to each of P prompts.

Shapes: rewards and advantages are [P, n]; ``.flatten()`` gives [N], prompt by prompt. If all rewards of a
group are equal, its advantages are exactly 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def leave_one_out_advantages(rewards: Tensor) -> Tensor:
    """Return A_ij = r_ij − mean of the group's other n − 1 rewards = (r_ij − mean_i)·n/(n − 1).

    The result is [P, n] in float32, or float64 if the rewards are.
    Raises ``ValueError`` unless the rewards are finite and [P, n] with n >= 2.
    Source: RLOO (arXiv 2402.14740). Our default: we do not know which advantages the FSPO paper uses.
    """
    centred = _centred(rewards)
    size = centred.shape[1]
    return centred * (size / (size - 1))


def group_normalized_advantages(rewards: Tensor, eps: float = 1e-6) -> Tensor:
    """Return A_ij = (r_ij − mean_i) / (std_i + eps), where the variance is divided by n − 1.

    The result is [P, n] in float32, or float64 if the rewards are.
    Raises ``ValueError`` as :func:`leave_one_out_advantages` does, and unless eps > 0.
    Source: GRPO (arXiv 2402.03300). n − 1 and eps are as in verl, slime and ROLL.
    """
    if not eps > 0.0:
        raise ValueError(f"eps must be above 0, got {eps}")
    centred = _centred(rewards)
    variance = centred.square().sum(dim=1, keepdim=True) / (centred.shape[1] - 1)
    return centred / (variance.sqrt() + eps)


def _centred(rewards: Tensor) -> Tensor:
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards must be [P, n] with n >= 2 responses per prompt, got {[*rewards.shape]}")
    rewards = rewards if rewards.dtype == torch.float64 else rewards.float()
    bad = (~rewards.isfinite()).nonzero()
    if len(bad):
        row, column = bad[0].tolist()
        raise ValueError(
            f"rewards must be finite: rewards[{row}, {column}] is {rewards[row, column].item()}, "
            f"{len(bad)} of {rewards.numel()} values are not finite"
        )
    # Subtract the group's first reward first: equal rewards then give exactly 0, however the mean rounds.
    relative = rewards - rewards[:, :1]
    return relative - relative.mean(dim=1, keepdim=True)
