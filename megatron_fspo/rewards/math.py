"""``math``: is the answer of the response the reference, as mathematics?

Tier 1 settles most answers at once, without any algebra (:mod:`.normalise`). What it is not sure of goes to
tier 2, math-verify on sympy, in worker processes with limits on time, CPU time and memory (:mod:`.pool`). A
grade that runs into a limit is 0 and counted; so is an answer that is not there, or that nobody should do
algebra with.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from megatron_fspo.job.remote import Loop
from megatron_fspo.rewards.extract import extract, reference
from megatron_fspo.rewards.grade import Grade, GradeOrFailure, GradeRequest, after
from megatron_fspo.rewards.normalise import Form, Sameness, canonical_form, compare_forms, form, too_much
from megatron_fspo.rewards.pool import KillablePool, Unfinished

if TYPE_CHECKING:
    from megatron_fspo.config import Reward  # at run time it would bring torch to the worker processes

TIER2 = "megatron_fspo.rewards.math_worker:compare"


class Mathematics:
    """The reward ``math``: 1 or 0."""

    def __init__(self, config: Reward, loop: Loop) -> None:
        self._extract = config.extract
        self._pool = KillablePool(
            TIER2, workers=config.workers, seconds=config.seconds, memory_gb=config.memory_gb
        )

    def grade(self, request: GradeRequest) -> Grade | Future[GradeOrFailure]:
        answer = extract(request.response, self._extract)
        if answer is None:
            return Grade(score=0.0, parsed=False, tier=1)
        gold, form_of_gold = _reference(request.prompt.answer)
        form_of_answer = form(answer)
        vote = canonical_form(form_of_answer)
        sameness = compare_forms(form_of_gold, form_of_answer)
        if sameness is not Sameness.UNSURE:
            return Grade(score=float(sameness is Sameness.EQUAL), answer=vote, tier=1)
        if too_much(gold) or too_much(answer):
            return Grade(score=0.0, answer=vote, parsed=False, tier=1)

        def grade(work: Future[Any]) -> GradeOrFailure:
            error = work.exception()
            if isinstance(error, Unfinished):
                return Grade(score=0.0, answer=vote, timed_out=True, tier=2)
            if error is not None:
                return request.failure(f"raised {error}", error)
            same, readable = work.result()
            return Grade(score=float(same), answer=vote, parsed=readable, tier=2)

        return after(self._pool.submit(gold, answer), grade)

    def close(self) -> None:
        self._pool.close()


@lru_cache(maxsize=4096)
def _reference(answer: str) -> tuple[str, Form]:
    """Kept, as a prompt has many responses."""
    gold = reference(answer)
    return gold, form(gold)
