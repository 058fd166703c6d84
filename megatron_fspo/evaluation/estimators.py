"""pass@k and maj@k of n responses to one problem.

Both are exact expectations over the C(n, k) ways to draw k of the n responses without replacement. They use
all responses and do not depend on their order.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import cache, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@cache
def pass_at(k: int, n: int, right: int) -> float:
    """Probability that k of n responses include a right one: 1 − C(n − c, k)/C(n, k) with c right ones.

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374). Computed in integers with one division, so
    the result is the float nearest to the true value. k is in 1 … n, and c in 0 … n.
    """
    ways = math.comb(n, k)
    return (ways - math.comb(n - right, k)) / ways


def majority_at(k: int, answers: Sequence[Hashable | None], scores: Sequence[float]) -> float:
    """Return the expected score of the majority answer of k responses, drawn from the n without replacement.

    Every response votes for its normalised answer; None does not vote. The answer with the most votes wins,
    and tied answers win with equal probability. The score of an answer is the mean over all its responses,
    which differ if the reward depends on more than the answer. A draw without votes scores 0.
    """
    n = len(answers)
    by_answer: dict[Hashable, list[float]] = {}
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            by_answer.setdefault(answer, []).append(score)
    # Sorted, so that the result does not depend on the order of the responses, not even in the last digit.
    votes = sorted((len(own), math.fsum(own) / len(own)) for own in by_answer.values())
    silent = n - sum(count for count, _ in votes)
    most = min(k, votes[-1][0]) if votes else 0
    elected = sum(_elected_with(j, k, n, votes, silent) for j in range(1, most + 1))
    return elected / float(_drawn(n, k, n)[k])


def _elected_with(j: int, k: int, n: int, votes: Sequence[tuple[int, float]], silent: int) -> float:
    """Return the expected score of draws in which the winner has j votes, times their probability.

    A draw without replacement is independent binomials (each response drawn with probability k/n) given
    their sum k, by whose probability the caller divides. ``share[i, r]`` is the probability that r are drawn
    and, of the answers so far, i have j votes and none has more; ``score`` is that times the summed scores of
    the tied answers. All terms are positive, so nothing cancels.
    """
    able = [(count, value) for count, value in votes if count >= j]
    share, score = np.zeros((2, min(len(able), k // j) + 1, k + 1))
    others = [silent, *(count for count, _ in votes if count < j)]
    share[0] = reduce(
        lambda row, count: np.convolve(row, _drawn(count, k, n))[: k + 1], others, np.eye(1, k + 1)[0]
    )
    for count, value in able:
        below, tied = np.split(_drawn(count, k, n)[: j + 1], [j])
        joins = tied * share[:-1, : k + 1 - j]
        scored = tied * score[:-1, : k + 1 - j] + value * joins
        share, score = (
            np.array([np.convolve(row, below)[: k + 1] for row in table]) for table in (share, score)
        )
        share[1:, j:] += joins
        score[1:, j:] += scored
    return float((score[1:, k] / np.arange(1, len(score))).sum())


@cache
def _drawn(count: int, k: int, n: int) -> Array:
    """Return P(Binomial(count, k/n) = i) for i = 0 … min(count, k), correctly rounded."""
    ways = [math.comb(count, i) * k**i * (n - k) ** (count - i) for i in range(min(count, k) + 1)]
    return np.array([number / n**count for number in ways])
