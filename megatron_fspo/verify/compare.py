"""One outcome against the reference: how far off, and within what limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.mcore.policy import Policy
from megatron_fspo.verify.production import Outcome, shard_of
from megatron_fspo.verify.reference import Reference


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Largest errors that pass."""

    gradient: float
    """Relative to the largest entry of the parameter's reference gradient."""
    value: float
    """Of log-probs, S, losses and means, in nats; of the gradient norm, relative."""


# fp32 rounds at 6e-8, and a gradient is a sum of thousands of terms; what a wrong factor or a lost token does
# is larger by orders of magnitude, and float64 shows everything else.
LIMITS = {
    torch.float64: Limits(gradient=1e-10, value=1e-10),
    torch.float32: Limits(gradient=1e-5, value=1e-5),
    torch.bfloat16: Limits(gradient=0.1, value=0.1),
}


@dataclass(frozen=True, kw_only=True)
class GradientError:
    """One parameter, over all ranks that hold a part or a copy of it."""

    error: float
    """max |got - want| / max |want|; inf where that is not a number, or want is 0 and got is not."""
    factor: float
    """Least-squares got ≈ factor · want; NaN where want is 0."""
    unlike: float
    """1 - cos² of the angle between the two: 0 where only the factor is wrong."""
    copies: float
    """How much the squared norms differ between ranks that hold the same part, relative."""


@dataclass(frozen=True, kw_only=True)
class Errors:
    """All of one case."""

    gradients: dict[str, GradientError]
    """By Hugging Face name (the first, where several make one parameter)."""
    log_prob: float
    log_ratio_sum: float
    loss: float
    """The largest of those of J, the entropy and the KL."""
    grad_norm: float
    """Relative; 0 where the optimizer gave none."""

    @property
    def worst_parameter(self) -> str:
        """The one with the largest gradient error."""
        return max(self.gradients, key=lambda name: self.gradients[name].error)

    @property
    def gradient(self) -> float:
        """The largest gradient error."""
        return self.gradients[self.worst_parameter].error


def compare(policy: Policy, outcome: Outcome, want: Reference) -> Errors:
    """Every rank's part of every gradient, and what all ranks share. Collective."""
    log_probs = torch.nn.utils.rnn.pad_sequence([*want.log_probs], batch_first=True)
    norm = want.grad_norm if outcome.grad_norm is None else outcome.grad_norm
    return Errors(
        gradients=_gradient_errors(policy, outcome, want),
        log_prob=_largest(outcome.log_probs - log_probs),
        log_ratio_sum=_largest(outcome.log_ratio_sums - want.log_ratio_sums),
        loss=max(_or_inf(abs(outcome.metrics[key] - value)) for key, (_, value) in reported(want).items()),
        grad_norm=_or_inf(abs(norm - want.grad_norm) / (want.grad_norm or 1.0)),
    )


def reported(want: Reference) -> dict[str, tuple[str, float]]:
    """Metrics of a training step that are compared: key → what it is, and its value."""
    return {
        "actor/pg_loss": ("loss", -want.objective),
        "actor/entropy": ("entropy", want.entropy),
        "actor/kl_loss": ("KL", want.kl),
    }


class _Part(NamedTuple):
    """One rank's part of one parameter."""

    name: str
    part: int
    """Ranks with the same number hold the same part."""
    gap: float
    scale: float
    product: float
    wanted: float
    gotten: float


def _gradient_errors(policy: Policy, outcome: Outcome, want: Reference) -> dict[str, GradientError]:
    mine: list[_Part] = []
    for row, gradient in outcome.gradients:
        got, wanted = gradient.double().cpu(), shard_of(row, want.gradients, policy)
        mine.append(
            _Part(
                name=f"{row.hf[0].name}{' (the copy on the last stage)' if row.copy else ''}",
                part=0 if row.layout == "replicated" else policy.groups.tp.rank(),
                gap=(got - wanted).abs().max().item(),
                scale=wanted.abs().max().item(),
                product=(got * wanted).sum().item(),
                wanted=wanted.square().sum().item(),
                gotten=got.square().sum().item(),
            )
        )
    everywhere: list[list[_Part]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    by_name: dict[str, list[_Part]] = {}
    for parts in everywhere:
        for part in parts:
            by_name.setdefault(part.name, []).append(part)
    return {name: _gradient_error(rows) for name, rows in sorted(by_name.items())}


def _gradient_error(parts: Sequence[_Part]) -> GradientError:
    gap, scale = max(_or_inf(part.gap) for part in parts), max(part.scale for part in parts)
    product = sum(part.product for part in parts)
    wanted, gotten = sum(part.wanted for part in parts), sum(part.gotten for part in parts)
    numbers = {part.part for part in parts}
    copies = [[part.gotten for part in parts if part.part == number] for number in numbers]
    return GradientError(
        error=gap / scale if scale else (0.0 if gap == 0 else math.inf),
        factor=product / wanted if wanted else math.nan,
        unlike=1 - product**2 / (wanted * gotten) if wanted and gotten else 0.0,
        copies=max(1 - min(squares) / max(squares) if max(squares) else 0.0 for squares in copies),
    )


def _largest(gap: Tensor) -> float:
    return _or_inf(gap.abs().max().item())


def _or_inf(value: float) -> float:
    """NaN compares with nothing; as infinity it is the worst."""
    return value if math.isfinite(value) else math.inf
