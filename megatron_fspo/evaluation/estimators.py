"""What n responses to one problem say of k responses to it: pass@k and maj@k.

Both are expectations over the C(n, k) ways to draw k of the n responses without replacement, not over one
draw: no response is wasted, and the order of the responses does not matter.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

EXACT_RESPONSES = 64
"""Up to so many responses to a problem maj@k is exact; beyond, it is the mean of :data:`DRAWS` draws."""
DRAWS = 10_000
"""Random draws of k responses per problem. The standard error of a problem's maj@k is at most half the spread
of its scores / √10,000 = 0.005 for scores of 0 and 1, and that of the mean over P problems 0.005/√P."""


@cache
def pass_at(k: int, n: int, right: int) -> float:
    """Probability that k of n responses hold a right one: 1 − C(n − c, k)/C(n, k) with c right ones.

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374), in integers up to one division, so it is
    the float nearest to the true value for every n.

    Raises:
        ValueError: k is not in 1 … n, or c not in 0 … n.
    """
    _check(k, n)
    if not 0 <= right <= n:
        raise ValueError(f"{right} right ones of {n} responses")
    ways = math.comb(n, k)
    return (ways - math.comb(n - right, k)) / ways


def majority_at(
    k: int, answers: Sequence[Hashable | None], scores: Sequence[float], *, seed: int = 0
) -> float:
    """Expected score of the answer that most of k responses give.

    Every response with an answer votes for it, and the answer with the most votes is elected; answers with
    equally many share the election evenly. An answer's score is the mean over all its responses (they can
    differ where the reward looks at more than the answer). A response without an answer does not vote, and
    where nobody votes the result is wrong: it scores 0.

    Args:
        answers: of the n responses, extracted and normalised; None where there is none.
        scores: of the n responses.
        seed: of the draws, where n is above :data:`EXACT_RESPONSES`.

    Raises:
        ValueError: k is not in 1 … n, or the lengths differ.
    """
    n = len(answers)
    _check(k, n)
    found: dict[Hashable, list[float]] = {}
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            found.setdefault(answer, []).append(score)
    # In an order that follows from the votes, so that the order of the responses changes no digit.
    votes = sorted((len(own), math.fsum(own) / len(own)) for own in found.values())
    if not votes:
        return 0.0
    counts = [count for count, _ in votes]
    values = np.array([value for _, value in votes])
    if k == n or n > EXACT_RESPONSES:
        draws = [[*counts, n - sum(counts)]] if k == n else _draws(k, n, counts, seed)
        return float(_elected(np.array(draws)[:, :-1], values).mean())
    return _exact(k, n, tuple(counts), values)


def _elected(votes: Array, values: Array) -> Array:
    """Score [draws] of what is elected by votes [draws, answers]; 0 where nobody votes."""
    most = votes.max(axis=1, keepdims=True)
    first = (votes == most) & (most > 0)
    return (first * values).sum(1) / np.maximum(first.sum(1), 1)


def _draws(k: int, n: int, counts: Sequence[int], seed: int) -> Array:
    """Votes [DRAWS, answers + 1] of random draws; the last column are those without an answer."""
    colors = [*counts, n - sum(counts)]
    return generator(seed, f"majority/{k}/{colors}").multivariate_hypergeometric(colors, k, size=DRAWS)


def _exact(k: int, n: int, counts: tuple[int, ...], values: Array) -> float:
    """Σ over answers a and votes j of value_a · P(a has j votes, no other more) · 1/(answers with j votes).

    The draw is that of independent binomials (each response is in it with probability p = k/n) given that
    they sum to k. So the probability is the coefficient of x^k in a product of one polynomial per answer,
    Σ_{i<j} b_i x^i + y b_j x^j, over P(Binomial(n, p) = k). The power of y counts ties, and the integral over
    y from 0 to 1 turns y^t into 1/(t + 1): exact by Gauss–Legendre nodes, as t < k. All terms are positive:
    nothing cancels.

    Arrays are [J, Y, k + 1]: votes of the elected answer, nodes, power of x.
    """
    p = k / n
    nodes, weights = _nodes(k)
    j = np.arange(1, min(max(counts), k) + 1)[:, None]
    nobody = np.zeros((len(j), len(nodes), k + 1))  # no answer was chosen yet to be the elected one
    nobody[:, :, : k + 1] = _binomial(n - sum(counts), p, k)[: k + 1]
    chosen = np.zeros_like(nobody)  # one was, times its value
    for count, value in zip(counts, values.tolist(), strict=True):
        terms = _binomial(count, p, k)
        before, picked = nobody, chosen
        nobody, chosen = np.zeros_like(before), np.zeros_like(before)
        for i in range(min(count, k) + 1):
            factor = (terms[i] * np.where(i < j, 1.0, np.where(i == j, nodes, 0.0)))[:, :, None]
            rest = k + 1 - i
            nobody[:, :, i:] += factor * before[:, :, :rest]
            chosen[:, :, i:] += factor * picked[:, :, :rest]
            if value and 0 < i <= len(j):
                chosen[i - 1, :, i:] += value * terms[i] * before[i - 1, :, :rest]
    return float((chosen[:, :, k] @ weights).sum() / _binomial(n, p, k)[k])


@cache
def _nodes(k: int) -> tuple[Array, Array]:
    """Of Gauss–Legendre on [0, 1], exact for polynomials of degree k."""
    nodes, weights = np.polynomial.legendre.leggauss(k // 2 + 1)
    return (nodes + 1) / 2, weights / 2


@cache
def _binomial(n: int, p: float, k: int) -> Array:
    """P(Binomial(n, p) = i) for i = 0 … k, 0 beyond n."""
    return np.array([math.comb(n, i) * p**i * (1 - p) ** (n - i) if i <= n else 0.0 for i in range(k + 1)])


def generator(seed: int, name: str) -> np.random.Generator:
    """The random stream of that name: the same whatever else is drawn."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


def powers_of_two(n: int) -> list[int]:
    """1, 2, 4, … up to n, and n: the k for which pass@k and maj@k are told."""
    return sorted({2**i for i in range(n.bit_length())} | {n})


def _check(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k = {k} of {n} responses: must be between 1 and {n}")
