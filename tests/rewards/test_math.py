"""``math``: tier 1 and tier 2 together, on ordinary answers and on those that nobody should work with."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest
from answers import STOPPED, boxed, hostile, pairs, prompt, rows
from processes_of import workers

from launch import REPO
from megatron_fspo.config import Reward
from megatron_fspo.rewards import Failure, Grade, Grader, tally

SECONDS = 3.0  # ordinary ones take milliseconds, or a second where the machine does much else
WORKERS = 2


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(Reward(name="math", workers=WORKERS, seconds=20.0), max_response_tokens=100) as grader:
        yield grader


def graded(future: Future[Grade | Failure]) -> Grade:
    found = future.result(timeout=120)
    assert isinstance(found, Grade), found
    return found


def ask(grader: Grader, gold: str, answer: str) -> Future[Grade | Failure]:
    return grader.submit(prompt(gold), STOPPED, boxed(answer))


def test_the_table_is_as_long_as_promised() -> None:
    assert len({row["kind"] for row in rows()}) >= 35 and len(pairs()) >= 39 + 60
    assert all(row["right"] and row["wrong"] for row in rows())


def test_ordinary_answers(grader: Grader) -> None:
    futures = [(gold, answer, right, ask(grader, gold, answer)) for gold, answer, right in pairs()]
    verdicts = [(gold, answer, right, graded(future)) for gold, answer, right, future in futures]
    assert [one for one in verdicts if one[3].score != float(one[2])] == []
    metrics = tally(Reward(name="math"), [verdict for *_, verdict in verdicts])
    assert metrics["reward/timeout_rate"] == (0, len(verdicts))
    assert metrics["reward/tier1"][0] + metrics["reward/tier2"][0] == len(verdicts)
    assert metrics["reward/tier1"][0] > len(verdicts) / 3


def test_the_answer_may_stand_elsewhere_or_not_at_all(grader: Grader) -> None:
    for response, score, parsed in [
        ("Answer: $\\frac{1}{2}$.", 1.0, True),
        ("#### 0.5", 1.0, True),
        ("\\boxed{4} then \\boxed{1/2}", 1.0, True),
        ("\\boxed{1/2} then \\boxed{4}", 0.0, True),
        ("I think it is 1/2", 0.0, False),
        ("", 0.0, False),
    ]:
        found = graded(grader.submit(prompt("\\frac12"), STOPPED, response))
        assert (found.score, found.parsed) == (score, parsed), response


@pytest.mark.parametrize("answer", ["10^{10^{10}}", "9" * 20_000, "((9!)!)!", "(" * 99 + ")" * 99, "5\x00"])
def test_what_nobody_should_do_algebra_with_goes_to_no_worker(grader: Grader, answer: str) -> None:
    future = ask(grader, "x^2", answer)
    assert future.done()
    found = graded(future)
    assert (found.score, found.parsed, found.timed_out, found.tier) == (0.0, False, False, 1)
    assert graded(ask(grader, answer, answer)).score == 1.0, "the same text is right all the same"


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
    for one, other, there, back in quirks:
        found = [graded(ask(grader, gold, answer)).score for gold, answer in ((one, other), (other, one))]
        assert found == [float(there == "right"), float(back == "right")], (one, other)


def resident() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.slow
def test_hostile_answers_among_ordinary_ones(tmp_path: Path) -> None:
    """Sixty of them, of which a dozen burn their whole time: they cost that time, and a fresh worker each."""
    before = workers()
    file = tmp_path / "written"
    ordinary = (pairs() * 2)[:500]
    bad = hostile(file)
    assert len(ordinary) >= 480 and len(bad) >= 60
    begun = time.monotonic()
    with Grader(Reward(name="math", workers=WORKERS, seconds=SECONDS), max_response_tokens=100) as grader:
        starting = time.monotonic() - begun

        def run(answers: list[tuple[str, str]]) -> tuple[list[Grade], float]:
            begun = time.monotonic()
            futures = [ask(grader, gold, answer) for gold, answer in answers]
            return [graded(future) for future in futures], time.monotonic() - begun

        sound = [(gold, answer) for gold, answer, _ in ordinary]
        run(sound)
        memory = resident()
        alone = max(run(sound)[1] for _ in range(2))  # the machine may do much else
        mixed: list[tuple[str, str]] = []
        step = len(sound) // len(bad)
        for number, answer in enumerate(bad):
            mixed += [*sound[number * step : (number + 1) * step], ("x^2+5", answer)]
        mixed += sound[len(bad) * step :]
        verdicts, together = run(mixed)
        assert resident() - memory < 100e6, "of which 1 MB is text"
    metrics = tally(Reward(name="math"), verdicts)

    by_pair = {(gold, answer): float(right) for gold, answer, right in ordinary}
    told = dict(zip(mixed, verdicts, strict=True))
    wrong = [
        pair for pair, found in told.items() if found.score != by_pair.get(pair, 0.0) and not found.timed_out
    ]
    assert wrong == []
    timed_out = sum(found.timed_out for found in verdicts)
    assert metrics["reward/timeout_rate"] == (timed_out, len(mixed))
    assert timed_out >= 5, "the pool had something to kill"
    assert not any(told[pair].timed_out for pair in by_pair)
    # A worker that died, of its CPU time perhaps, is tried once more.
    lost = 2 * timed_out * (SECONDS + starting) / WORKERS
    assert together < 3 * alone + lost + 1, (together, alone, timed_out, starting)
    assert not file.exists(), "a response was run"
    assert workers() == before
