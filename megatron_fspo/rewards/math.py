"""``math``: checks that the answer of a response is mathematically equal to the reference.

Tier 1 decides most answers immediately, without algebra (:mod:`.normalise`). The others go to tier 2,
math-verify on sympy, in worker processes with limits on time, CPU time and memory (:mod:`.pool`). Grades that
exceed a limit score 0 and are counted, as do missing answers and those too hostile for algebra.
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
    function = TIER2

    def grade(self, request: GradeRequest) -> Grade | Future[GradeOrFailure]:
        answer = extract(request.final, self._extract)
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
    """Cached, as a prompt has many responses."""
    gold = reference(answer)
    return gold, form(gold)
