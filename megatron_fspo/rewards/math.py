"""``math``: is the answer of the response the reference, as mathematics?

Tier 1 settles most answers at once, without any algebra (:mod:`.normalise`). What it is not sure of goes to
tier 2, math-verify on sympy, in worker processes with limits on time, CPU time and memory (:mod:`.pool`). A
verdict that runs into a limit is 0 and counted; so is an answer that is not there, or that nobody should do
algebra with.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import lru_cache

from megatron_fspo.rewards.extract import extract, reference
from megatron_fspo.rewards.normalise import Form, Verdict, canonical_form, compare_forms, form, too_much
from megatron_fspo.rewards.part import Answer, Outcome, after
from megatron_fspo.rewards.pool import KillablePool, Unfinished
from megatron_fspo.rewards.verdict import Failure, Request
from megatron_fspo.rewards.worker import same_mathematics

LIBRARIES = ("math_verify", "megatron_fspo.rewards.warm")


class Mathematics:
    """The reward ``math``: 1 or 0.

    Args:
        extract: where the answer stands, a value of ``reward.extract``.
        workers, seconds, memory_gb: of the pool of tier 2.
    """

    name = "math"

    def __init__(self, *, extract: str, workers: int, seconds: float, memory_gb: float) -> None:
        self._extract = extract
        self._seconds = seconds
        self._pool = KillablePool(
            same_mathematics, workers=workers, seconds=seconds, memory_gb=memory_gb, libraries=LIBRARIES
        )

    def grade(self, request: Request) -> Answer:
        found = extract(request.response, self._extract)
        if found is None:
            return Outcome(value=0.0, parsed=False, tier=1)
        gold, form_of_gold = _reference(request.prompt.answer)
        form_of_found = form(found)
        answer = canonical_form(form_of_found)
        verdict = compare_forms(form_of_gold, form_of_found)
        if verdict is not Verdict.UNSURE:
            return Outcome(value=float(verdict is Verdict.EQUAL), answer=answer, tier=1)
        if too_much(gold) or too_much(found):
            return Outcome(value=0.0, answer=answer, parsed=False, tier=1)

        def told(work: Future[tuple[bool, bool]]) -> Outcome | Failure:
            error = work.exception()
            if isinstance(error, Unfinished | MemoryError | RecursionError):
                return Outcome(value=0.0, answer=answer, timed_out=True, tier=2)
            if error is not None:
                return request.raised(error)
            same, readable = work.result()
            return Outcome(value=float(same), answer=answer, parsed=readable, tier=2)

        return after(self._pool.submit(gold, found, self._seconds), told)

    def close(self) -> None:
        self._pool.close()


@lru_cache(maxsize=4096)
def _reference(answer: str) -> tuple[str, Form]:
    """Kept, as a prompt has many responses."""
    gold = reference(answer)
    return gold, form(gold)
