"""pass@k and maj@k of n responses to one problem.

Both are expectations over the C(n, k) ways to draw k of the n responses without replacement, not over one
draw: no response is wasted, and the order of the responses does not matter. Both are exact for every n.
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
    """Probability that k of n responses hold a right one: 1 − C(n − c, k)/C(n, k) with c right ones.

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374), in integers up to one division, so it is
    the float nearest to the true value for every n. k is in 1 … n, and c in 0 … n.
    """
    ways = math.comb(n, k)
    return (ways - math.comb(n - right, k)) / ways


def majority_at(k: int, answers: Sequence[Hashable | None], scores: Sequence[float]) -> float:
    """Expected score of the answer that most of k responses give; k of the n are drawn without replacement.

    Every response with an answer, extracted and normalised, votes for it, and the answer with the most votes
    is elected; answers with equally many share the election evenly. An answer's score is the mean over all
    its responses (they can differ where the reward looks at more than the answer). A response without an
    answer, None, does not vote, and where nobody votes the result is wrong: it scores 0.
    """
    n = len(answers)
    by_answer: dict[Hashable, list[float]] = {}
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            by_answer.setdefault(answer, []).append(score)
    # In an order that follows from the votes, so that the order of the responses changes no digit.
    votes = sorted((len(own), math.fsum(own) / len(own)) for own in by_answer.values())
    silent = n - sum(count for count, _ in votes)
    most = min(k, votes[-1][0]) if votes else 0
    elected = sum(_elected_with(j, k, n, votes, silent) for j in range(1, most + 1))
    return elected / float(_drawn(n, k, n)[k])


def _elected_with(j: int, k: int, n: int, votes: Sequence[tuple[int, float]], silent: int) -> float:
    """Score of draws in which j votes elect, times their probability.

    The draw is that of independent binomials (each response is in it with probability k/n) given that they
    sum to k, by whose probability the caller divides. ``share`` [ties + 1, k + 1] is the probability that, of
    the answers so far, none has more than j votes and so many have j, by the responses drawn; ``score`` is
    that times the summed scores of the tied ones. All terms are positive: nothing cancels.
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
    """P(Binomial(count, k/n) = i) for i = 0 … min(count, k): the nearest floats, whatever the size."""
    ways = [math.comb(count, i) * k**i * (n - k) ** (count - i) for i in range(min(count, k) + 1)]
    return np.array([number / n**count for number in ways])


def powers_of_two(n: int) -> list[int]:
    """1, 2, 4, … up to n, and n: the k of the pass@k and maj@k in a table."""
    return sorted({2**i for i in range(n.bit_length())} | {n})
