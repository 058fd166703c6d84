"""``math``: is the answer of the response the reference, as mathematics?

Tier 1 settles most answers at once, without any algebra (:mod:`.normalise`). What it is not sure of goes to
tier 2, math-verify on sympy, in worker processes with limits on time, CPU time and memory (:mod:`.pool`). A
grade that runs into a limit is 0 and counted; so is an answer that is not there, or that nobody should do
algebra with.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import lru_cache

from megatron_fspo.rewards.extract import extract, reference
from megatron_fspo.rewards.grade import Grade, GradeOrFailure, GradeRequest
from megatron_fspo.rewards.normalise import Form, canonical, compare, form, too_much
from megatron_fspo.rewards.pool import InWorkers

TIER2 = "megatron_fspo.rewards.math_worker:compare"


class Mathematics(InWorkers):
    """The reward ``math``: 1 or 0."""

    function = TIER2

    def grade(self, request: GradeRequest) -> Grade | Future[GradeOrFailure]:
        answer = extract(request.response, self._extract)
        if answer is None:
            return Grade(score=0.0, parsed=False, tier=1)
        gold, form_of_gold = _reference(request.prompt.answer)
        form_of_answer = form(answer)
        vote = canonical(form_of_answer)
        same = compare(form_of_gold, form_of_answer)
        if same is not None:
            return Grade(score=float(same), answer=vote, tier=1)
        if too_much(gold) or too_much(answer):
            return Grade(score=0.0, answer=vote, parsed=False, tier=1)

        def grade(value: tuple[bool, bool]) -> Grade:
            same, readable = value
            return Grade(score=float(same), answer=vote, parsed=readable, tier=2)

        unfinished = Grade(score=0.0, answer=vote, timed_out=True, tier=2)
        return self.ask(request, gold, answer, unfinished=unfinished, then=grade)


@lru_cache(maxsize=4096)
def _reference(answer: str) -> tuple[str, Form]:
    """Kept, as a prompt has many responses."""
    gold = reference(answer)
    return gold, form(gold)
