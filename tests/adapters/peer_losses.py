"""Random responses, and a loss of ours on them as it is written: what peers' own losses are held against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fspo.losses import Loss


@dataclass(frozen=True, kw_only=True)
class Responses:
    """n responses, padded to T tokens, in float64."""

    old: Tensor
    """[n, T]."""
    new: Tensor
    """[n, T]; a leaf is made of it."""
    mask: Tensor
    """[n, T] bool."""
    advantages: Tensor
    """[n]."""

    def leaf(self) -> Tensor:
        return self.new.clone().requires_grad_()


def random_responses(seed: int, n: int = 12, longest: int = 30, spread: float = 0.1) -> Responses:
    """Responses whose policy moved by so many nats per token; none is empty, one has A = 0."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (n,), generator=generator)
    lengths[0] = longest
    shape = (n, longest)
    old = -2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
    advantages = torch.randn(n, generator=generator, dtype=torch.float64)
    advantages[1] = 0.0
    return Responses(
        old=old,
        new=old + spread * torch.randn(shape, generator=generator, dtype=torch.float64),
        mask=torch.arange(longest) < lengths[:, None],
        advantages=advantages,
    )


def as_written(loss: Loss, responses: Responses) -> tuple[float, Tensor]:
    """−J and its gradient [n, T] with respect to the log-probs, by autograd through ``definition``."""
    new = responses.leaf()
    total: Tensor | float = 0.0
    for row, old, kept, advantage in zip(
        new, responses.old, responses.mask, responses.advantages.tolist(), strict=True
    ):
        defined = loss.definition((row - old)[kept], advantage, row[kept])
        if defined.mean == "token":
            total = total - defined.objective.sum() / responses.mask.sum()
        else:
            total = total - defined.objective.mean() / len(new)
    total.backward()
    return total.item(), new.grad
