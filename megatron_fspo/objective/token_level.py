"""Token-level baselines, GRPO and DAPO: one importance ratio and one clip decision per token.

Both use ``token_surrogate`` and differ in its limits and in how tokens are added up (``aggregation_weight``):

* GRPO (arXiv 2402.03300): 0.2 on both sides; "sequence-mean", where every sequence weighs the same.
* DAPO (arXiv 2503.14476): 0.2 below, 0.28 above; "token-mean", where every token weighs the same.

Shapes: T response tokens of all sequences, packed; no prompt tokens. Units: nats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_fspo.objective.band import ConstantDualClip, require_epsilons
from megatron_fspo.objective.surrogate import Surrogate, check_rows, min_form

Aggregation = Literal["sequence-mean", "token-mean"]


@dataclass(frozen=True, kw_only=True)
class TokenSurrogate(Surrogate):
    """The fields of ``Surrogate``, all [T]: a row is a token, ``weight`` is dJ/dlog π(y_t).

    A rate over these rows is a share of tokens and must not be compared with a share of sequences.
    """


def token_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    eps_low: float,
    eps_high: float,
    dual_clip_ratio: float | None = None,
) -> TokenSurrogate:
    """PPO's clipped objective per token, with r = exp(log π_new(y_t) − log π_old(y_t))::

        J_t = min(r·A, clip(r, 1 − eps_low, 1 + eps_high)·A)
        J_t = max(J_t, dual_clip_ratio·A)                        if A < 0 and there is a dual clip
        weight_t = dJ_t/dlog π(y_t) = r·A, or 0 where a clip acts

    Args:
        log_ratio: [T] in nats, float32 or float64. Detached here.
        advantages: [T], the sequence's advantage repeated for each of its tokens.
        eps_low: from 0 to 1, both excluded.
        eps_high: above 0.
        dual_clip_ratio: above 1; the usual value is 3.

    A non-finite token has objective and weight 0 and sets ``nonfinite`` for itself only; whether its sequence
    is dropped is the caller's decision.

    Raises:
        ValueError: shapes that differ, a dtype other than those two, or a limit out of range.

    Source: PPO (arXiv 1707.06347); dual clip from arXiv 1912.09729.
    """
    check_rows(log_ratio, advantages=advantages)
    require_epsilons("token_surrogate", eps_low, eps_high)
    one = torch.ones_like(log_ratio)
    if dual_clip_ratio is None:
        dual_bound = one * math.inf
    else:
        dual_bound = ConstantDualClip(ratio=dual_clip_ratio).log_bound(one, scale=one)
    low, high = one * math.log1p(-eps_low), one * math.log1p(eps_high)
    rows = min_form(log_ratio, advantages, low, high, dual_bound, scale=one, cooling=one, present=one > 0)
    return TokenSurrogate(**vars(rows))


def aggregation_weight(
    kind: Aggregation, lengths_of_token: Tensor, num_sequences: int, num_tokens: int
) -> Tensor:
    """Factor [T] of each token's objective, such that Σ_t factor_t·J_t is the mean that ``kind`` names::

        "sequence-mean":  1 / (num_sequences·L)                  L: length of the token's own sequence
        "token-mean":     1 / num_tokens

    Args:
        kind: which mean.
        lengths_of_token: [T], length of the response that the token is part of; 0 outside, for a factor of 0.
        num_sequences: non-empty sequences of the whole optimizer step, over all ranks and micro-batches.
        num_tokens: response tokens of the same.

    Returns [T] in float32, or in the dtype of ``lengths_of_token`` if that is floating.
    Raises ``ValueError`` for another kind or a count below 1.
    """
    if num_sequences < 1 or num_tokens < 1:
        raise ValueError(
            f"num_sequences and num_tokens must be at least 1, got {num_sequences} and {num_tokens}"
        )
    lengths = lengths_of_token if lengths_of_token.is_floating_point() else lengths_of_token.float()
    if kind == "sequence-mean":
        factor = 1.0 / (num_sequences * lengths)
    elif kind == "token-mean":
        factor = torch.full_like(lengths, 1.0 / num_tokens)
    else:
        raise ValueError(f'kind must be "sequence-mean" or "token-mean", got {kind!r}')
    return torch.where(lengths > 0, factor, 0.0)


def k3_kl(log_ratio_tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, count) over masked tokens of k3 = r − 1 − log r, r = π_new/π_old: KL(old‖new) is sum/count.

    Args:
        log_ratio_tokens: log r [T] in nats, of tokens sampled from the old policy.
        mask: bool [T]; False tokens may hold anything.

    Returns two float64 scalars, to be added up over ranks before one is divided by the other. Tokens with a
    non-finite k3 are in neither.
    """
    # expm1(x) − x keeps the digits of x²/2 that exp(x) − 1 − x loses.
    log_ratio = log_ratio_tokens.detach().double()
    k3 = log_ratio.expm1() - log_ratio
    counted = mask & k3.isfinite()
    return torch.where(counted, k3, 0.0).sum(), counted.sum().double()
