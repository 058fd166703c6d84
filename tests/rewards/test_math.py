"""``math``: tier 1 and tier 2 together, on ordinary answers and on those that nobody should work with."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest
from answers import STOPPED, boxed, graded, hostile, pairs, prompt
from processes_of import workers

import math_pairs
from launch import REPO
from megatron_fspo.config import Reward
from megatron_fspo.rewards import Failure, Grade, Grader, tally

SECONDS = 3.0  # ordinary ones take milliseconds, or a second where the machine does much else
WORKERS = 2


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(Reward(name="math", workers=WORKERS, seconds=20.0), max_response_tokens=100) as grader:
        yield grader


def ask(grader: Grader, gold: str, answer: str) -> Future[Grade | Failure]:
    return grader.submit(prompt(gold), STOPPED, boxed(answer))


def test_ordinary_answers(grader: Grader) -> None:
    futures = [(gold, answer, right, ask(grader, gold, answer)) for gold, answer, right in pairs()]
    verdicts = [(gold, answer, right, graded(future)) for gold, answer, right, future in futures]
    assert [one for one in verdicts if one[3].score != float(one[2])] == []
    metrics = tally(Reward(name="math"), [verdict for *_, verdict in verdicts])
    assert metrics["reward/timeout_rate"] == (0, len(verdicts))
    assert metrics["reward/tier1"][0] + metrics["reward/tier2"][0] == len(verdicts)
    assert metrics["reward/tier1"][0] > len(verdicts) / 3


def test_answers_of_public_reports(grader: Grader) -> None:
    """Small inputs of our own, for what was reported to other projects."""
    text = Path(__file__).with_name("reports.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    futures = [grader.submit(prompt(row["gold"]), STOPPED, row["response"]) for row in rows]
    scores = [graded(future).score for future in futures]
    assert [row for row, score in zip(rows, scores, strict=True) if row["score"] != score] == []


def test_pairs_by_construction(grader: Grader) -> None:
    """Of benchmarks/math_pairs.py: no different number is rewarded."""
    made = list(math_pairs.pairs(1000, seed=7))
    scores = [graded(future).score for future in [ask(grader, gold, answer) for gold, answer, _ in made]]
    wrong = [pair for pair, score in zip(made, scores, strict=True) if score != pair[2]]
    assert [pair for pair in wrong if not pair[2]] == []
    assert len(wrong) <= 0.02 * 500, wrong


@pytest.mark.parametrize("answer", ["10^{10^{10}}", "9" * 20_000, "((9!)!)!", "(" * 99 + ")" * 99, "5\x00"])
def test_what_nobody_should_do_algebra_with_goes_to_no_worker(grader: Grader, answer: str) -> None:
    future = ask(grader, "x^2", answer)
    assert future.done()
    found = graded(future)
    assert (found.score, found.parsed, found.timed_out, found.tier) == (0.0, False, False, 1)
    assert graded(ask(grader, answer, answer)).score == 1.0, "the same text is right all the same"


QUIRKS = [
    (r"x<1 \text{ or } x>2", r"(-\infty,1)\cup(2,\infty)", "wrong", "wrong"),
    (r"x=5", r"y=5", "wrong", "wrong"),
    (r"50", r"0.5", "wrong", "wrong"),
    (r"100", r"100\%", "right", "right"),
    (r"1", r"100\%", "right", "right"),
    (r"(1,2)", r"1,2", "right", "right"),
    (r"\pm 2", r"2,-2", "right", "right"),
    (r"x", r"X", "right", "right"),
    (r"ab", r"ba", "right", "right"),
    (r"evil", r"live", "wrong", "wrong"),
    (r"\pi", r"3.141593", "right", "right"),
    (r"\pi", r"3.14", "wrong", "wrong"),
    (r"-i", r"\frac{1}{i}", "right", "right"),
]
"""As in the table of the documentation, which is shorter."""


def table_of_quirks() -> list[tuple[str, str, str, str]]:
    """(one, other, verdict on other where one is the reference, the reverse) of the documentation."""
    text = (REPO / "docs/rewards.md").read_text(encoding="utf-8")
    lines = re.findall(
        r"^\| `(.+?)` \| `(.+?)` \| (right|wrong) \| (right|wrong) \|", text, flags=re.MULTILINE
    )
    return [tuple(cell.replace("\\\\|", "|") for cell in line) for line in lines]  # type: ignore[misc]


def test_the_documentation_says_what_is_odd(grader: Grader) -> None:
    quirks = table_of_quirks()
    assert len(quirks) > 15 and any(there != back for *_, there, back in quirks)
    for one, other, there, back in [*quirks, *QUIRKS]:
        found = [graded(ask(grader, gold, answer)).score for gold, answer in ((one, other), (other, one))]
        assert found == [float(there == "right"), float(back == "right")], (one, other)


@pytest.mark.slow
def test_hostile_answers_among_ordinary_ones(tmp_path: Path) -> None:
    """Sixty of them, of which a dozen burn their whole time: they cost that time, and a fresh worker each."""
    before, file = workers(), tmp_path / "written"
    right = {(gold, answer): float(right) for gold, answer, right in pairs()}
    mixed = [*right, *right, *(("x^2+5", answer) for answer in hostile(file))]
    random.Random(0).shuffle(mixed)
    with Grader(Reward(name="math", workers=WORKERS, seconds=SECONDS), max_response_tokens=100) as grader:
        graded(ask(grader, *mixed[0]))
        memory, begun = psutil.Process().memory_info().rss, time.monotonic()
        futures = [ask(grader, gold, answer) for gold, answer in mixed]
        verdicts = dict(zip(mixed, map(graded, futures), strict=True))
        took = time.monotonic() - begun
        assert psutil.Process().memory_info().rss - memory < 100e6, "of which 1 MB is text"
    late = {pair for pair, grade in verdicts.items() if grade.timed_out}
    assert [pair for pair in verdicts.keys() - late if verdicts[pair].score != right.get(pair, 0.0)] == []
    assert len(late) >= 5 and not late & right.keys(), "the pool had something to kill, and only that"
    # A worker that died, of its CPU time perhaps, is tried once more; and new ones take a while to start.
    assert took < 2 * len(late) * (SECONDS + 5) / WORKERS + 60, (took, late)
    assert not file.exists(), "a response was run"
    assert workers() == before
