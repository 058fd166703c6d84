"""Advantages from the rewards of a group: n responses to each of P prompts.

Shapes: rewards and advantages [P, n]; ``.flatten()`` gives the surrogate's [N], prompt by prompt.
A group whose rewards are all equal has advantages of exactly 0, so that rounding never becomes a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def leave_one_out_advantages(rewards: Tensor) -> Tensor:
    """A_ij = r_ij − mean of the other n − 1 rewards of the group = (r_ij − mean_i)·n/(n − 1).

    Returns [P, n] in float32, or float64 if the rewards are.
    Raises ``ValueError`` unless rewards are [P, n] with n >= 2 and finite; the message names the position.
    Source: RLOO (arXiv 2402.14740). The default here; which advantages the FSPO paper uses is not known.
    """
    centred = _centred(rewards)
    size = centred.shape[1]
    return centred * (size / (size - 1))


def group_normalized_advantages(rewards: Tensor, eps: float = 1e-6) -> Tensor:
    """A_ij = (r_ij − mean_i) / (std_i + eps), where std has n − 1 in its denominator.

    Returns [P, n] in float32, or float64 if the rewards are.
    Raises ``ValueError`` as ``leave_one_out_advantages`` does, and unless eps > 0.
    Source: GRPO (arXiv 2402.03300); n − 1 and the place and size of eps are those of verl, slime and ROLL.
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
            f"{len(bad)} of {rewards.numel()} are not"
        )
    # Differences from the group's first reward: equal rewards then give exact zeros, however the mean rounds.
    relative = rewards - rewards[:, :1]
    return relative - relative.mean(dim=1, keepdim=True)
