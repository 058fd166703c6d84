"""The grader: several rewards at a time, functions of one's own, failures, metrics, and an end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import own_rewards
import pytest
from answers import STOPPED, boxed, graded, prompt
from processes_of import workers

from megatron_fspo.config import Reward
from megatron_fspo.errors import InputError
from megatron_fspo.rewards import Failure, Grade, Grader, PendingGrade, check_reward, get_reward, tally
from megatron_fspo.types import Completion


def make(**keys: Any) -> Grader:
    return Grader(Reward(**keys), max_response_tokens=100)


def ask(grader: Grader, response: str, answer: str = "5", **fields: Any) -> PendingGrade:
    return grader.submit(prompt(answer, index=7, fields=fields), STOPPED, response)


def failed(future: Future[Grade | Failure]) -> Failure:
    failure = future.result(timeout=60)
    assert isinstance(failure, Failure), failure
    return failure


def test_built_in_functions() -> None:
    with make(name="exact_match") as grader:
        found = ask(grader, " 5\n")
        assert found.done(), "it takes no time, so it takes no detour"
        assert graded(found) == Grade(reward=1.0, score=1.0, answer="5")
        wrong = graded(ask(grader, "6"))
        assert wrong.score == 0.0 and tally(Reward(name="exact_match"), [wrong]) == {}


def test_several_rewards_are_summed_by_weight() -> None:
    also = {"format": 0.1, "own_rewards:length": -0.01}
    with make(name="exact_match", extract="boxed", weight=2.0, also=also) as grader:
        response = "\\boxed{5}"
        right = graded(ask(grader, response, response))
        assert right.parts == {"format": 1.0, "own_rewards:length": 9.0}
        assert right.score == 1.0 and right.reward == pytest.approx(2 + 0.1 - 0.09)
        wrong = graded(ask(grader, "5", response))
        assert (wrong.score, wrong.reward, wrong.parsed) == (0.0, pytest.approx(-0.01), False)
        config = Reward(name="exact_match", extract="boxed", weight=2.0, also=also)
        assert tally(config, [right, wrong]) == {
            "reward/parse_fail_rate": (1.0, 2.0),
            "reward/format/mean": (1.0, 2.0),
            "reward/own_rewards:length/mean": (10.0, 2.0),
        }
        assert tally(config, [])["reward/format/mean"] == (0.0, 0.0)


def test_a_sum_that_is_too_large_is_a_failure() -> None:
    with make(name="exact_match", weight=1e9) as grader:
        assert graded(ask(grader, "4", "5")).reward == 0.0
        found = ask(grader, "5", "5").result(timeout=20)
    assert isinstance(found, Failure) and "1e+09" in found.problem and found.prompt.answer == "5"


def test_mathematics_with_a_penalty_on_length() -> None:
    grades = []
    with make(name="math", workers=1, overlong_tokens=20, overlong_penalty=0.5) as grader:
        for tokens, penalty in ((80, 0.0), (81, -0.025), (90, -0.25), (100, -0.5)):
            long = Completion(
                token_ids=[1] * tokens, log_probs=[0.0] * tokens, finish_reason="stop", weight_version=0
            )
            found = graded(grader.submit(prompt("\\frac12"), long, boxed("\\sqrt{\\frac14}")))
            assert (found.score, found.tier, found.answer) == (1.0, 2, "\\sqrt{\\frac14}")
            assert (found.reward, found.parts["overlong"]) == pytest.approx((1 + penalty, penalty))
            grades.append(found)
        grades.append(graded(ask(grader, "no answer")))
    metrics = tally(Reward(name="math", overlong_tokens=20), grades)
    assert metrics.pop("reward/overlong/mean") == (pytest.approx(-0.775), 5.0)
    assert metrics == {
        "reward/timeout_rate": (0.0, 5.0),
        "reward/parse_fail_rate": (1.0, 5.0),
        "reward/tier1": (1.0, 5.0),
        "reward/tier2": (4.0, 5.0),
    }


@pytest.mark.parametrize(("response", "value"), [("\\boxed{}", 0.0), ("\\boxed{5}", 1.0), ("5", 0.0)])
def test_format(response: str, value: float) -> None:
    with make(name="format") as grader:
        grade = graded(ask(grader, response, "6"))
    assert (grade.score, grade.parsed) == (value, bool(value))


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize("name", ["field", "field_awaited", "returns_awaitable", "instance"])
def test_a_function_of_ones_own_gets_all_fields(name: str, in_process: bool) -> None:
    with make(name=f"own_rewards:{name}", in_process=in_process) as grader:
        found = graded(ask(grader, "so \\boxed{0.50}", level=3, rest=own_rewards.REST))
        assert found == Grade(reward=3.0, score=3.0, answer="1/2")


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("raises", f"raised KeyError: 'x' ({own_rewards.__file__}:"),
        ("raises_awaited", f"raised KeyError: 'x' ({own_rewards.__file__}:"),
        ("exits", f"raised SystemExit: x ({own_rewards.__file__}:"),
        ("exits_awaited", f"raised SystemExit: x ({own_rewards.__file__}:"),
        ("cancels_itself", f"raised CancelledError ({own_rewards.__file__}:"),
        ("nan_awaited", "returned nan instead of a finite number"),
    ],
)
def test_what_a_reward_does_wrong_is_a_failure(name: str, problem: str, in_process: bool) -> None:
    with make(name=f"own_rewards:{name}", in_process=in_process) as grader:
        failure = failed(ask(grader, "x"))
        assert failure.problem.startswith(problem), failure.problem
        assert failure.evidence()["prompt_index"] == 7 and failure.response == "x"
        assert failed(ask(grader, "x")).problem == failure.problem, "the grader goes on"
    with make(name="exact_match", also={f"own_rewards:{name}": 0.1}, in_process=in_process) as grader:
        assert failed(ask(grader, "x")).problem == f"with 'own_rewards:{name}': {failure.problem}"


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize("name", ["sleeps", "sleeps_awaited", "waits"])
def test_calls_that_wait_are_cancelled_by_the_end(name: str, in_process: bool, tmp_path: Path) -> None:
    """Those that run, those that wait for their turn, and those that give something to wait for."""
    before, file = workers(), tmp_path / "file"
    response = str(file) if name == "waits" else "4"
    with make(name=f"own_rewards:{name}", concurrency=2, in_process=in_process) as grader:
        futures = [ask(grader, response) for _ in range(6)]
        if name == "waits":
            until(lambda: file.exists() and file.read_text() == "waits\n" * 6)
        # Not at once: a thread may still be starting.
        until(lambda: any(line.startswith(f"{own_rewards.__file__}:") for line in grader.standing()))
        begun = time.monotonic()
    assert time.monotonic() - begun < 5
    for future in futures:
        assert future.cancelled()
        assert all(isinstance(one, Future) and one.done() for one in future.by_reward.values())
    assert workers() == before
    if name == "waits":
        assert file.read_text() == "waits\n" * 6 + "cancelled\n" * 6


def until(find: Callable[[], Any]) -> Any:
    """What is found within 30 seconds."""
    end = time.monotonic() + 30
    while not (found := find()) and time.monotonic() < end:
        time.sleep(0.1)
    assert found
    return found


def test_calls_without_end_slow_neither_the_trainer_nor_other_grades() -> None:
    with make(name="own_rewards:loops") as grader:
        graded(ask(grader, "first"))
        endless = [ask(grader, "loop") for _ in range(64)]
        time.sleep(2)
        assert any(line.startswith(f"{own_rewards.__file__}:") for line in until(grader.standing))
        begun = time.monotonic()
        for _ in range(200):
            time.sleep(0.001)  # waits for the GIL, 5 ms for each of the threads if they were here
        assert time.monotonic() - begun < 10
        assert graded(ask(grader, "another")).score == 1.0
        begun = time.monotonic()
    assert time.monotonic() - begun < 5 and all(future.cancelled() for future in endless)


def test_a_process_that_crashes_is_a_failure_of_all_it_had() -> None:
    before = workers()
    with make(name="own_rewards:dies", also={"exact_match": 0.1}) as grader:
        for future in [ask(grader, response) for response in ("sleep", "die", "sleep")]:
            assert failed(future).problem == "ended its process, status 3"
        assert failed(ask(grader, "later")).problem == "ended its process, status 3"
        assert workers() == before


def test_the_process_of_rewards_is_small_and_prints(capfd: pytest.CaptureFixture) -> None:
    with make(name="own_rewards:heavy") as grader:
        assert graded(ask(grader, "said by a reward")).score == 0.0
    assert capfd.readouterr() == ("said by a reward\n", "")


@pytest.mark.parametrize("name", ["sleeps", "sleeps_awaited"])
def test_a_reward_that_sleeps_costs_no_more_than_its_longest(name: str) -> None:
    """1,024 responses, 2 s each. What is added here is the work of one core on a busy machine."""
    with make(name=f"own_rewards:{name}") as grader:
        begun = time.monotonic()
        futures = [ask(grader, "2") for _ in range(1024)]
        asked = time.monotonic() - begun
        assert [graded(future).score for future in futures] == [1.0] * 1024
        took = time.monotonic() - begun
    # 64 at a time would take 32 s. The rest is the work of starting threads on a busy machine.
    assert asked < 10 and 2 <= took < 10


@pytest.mark.parametrize("in_process", [False, True])
def test_concurrency_bounds_the_calls(in_process: bool) -> None:
    own_rewards.places.update(now=0, most=0)
    with make(name="own_rewards:at_a_time", concurrency=3, in_process=in_process) as grader:
        assert max(graded(future).score for future in [ask(grader, "0.05") for _ in range(12)]) == 3
    assert own_rewards.places == {"now": 0, "most": 3 * in_process}


def test_grades_come_to_whoever_asks_from_any_thread() -> None:
    with make(name="math", workers=2, also={"own_rewards:length": 0.001}) as grader:
        found: dict[int, list[float]] = {}

        def ask_many(number: int) -> None:
            futures = [ask(grader, boxed(f"\\sqrt{{{i * i}}}"), str(number)) for i in range(20)]
            found[number] = [graded(future).score for future in futures]

        threads = [threading.Thread(target=ask_many, args=(number,)) for number in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {number: [float(i == number) for i in range(20)] for number in range(5)}


def test_closing_cancels_and_leaves_nothing() -> None:
    before = workers()
    keys: dict[str, Any] = {"also": {"own_rewards:sleeps_awaited": 0.1, "own_rewards:sleeps": 0.1}}
    grader = make(name="math", workers=2, seconds=60.0, **keys)
    grader.submit(prompt("5"), STOPPED, "1").cancel()  # a caller may give up
    futures = [ask(grader, "60") for _ in range(20)]
    begun = time.monotonic()
    grader.close()
    grader.close()
    assert time.monotonic() - begun < 5
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(timeout=1)
    assert workers() == before
    assert "async rewards" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(RuntimeError, match="closed"):
        ask(grader, "1")


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"name": "math", "also": {"formt": 0.1}}, "did you mean 'format'"),
        ({"name": "exact_match", "also": {"no_such_module:f": 1.0}}, "cannot import 'no_such_module'"),
        ({"name": "exact_match", "also": {"exact_match": 1.0}}, "reward.also has 'exact_match'"),
        ({"name": "http", "url": "localhost:80"}, "reward.url = 'localhost:80'"),
        ({"name": "http", "url": "http://x:port"}, "reward.url = 'http://x:port'"),
    ],
)
def test_what_a_run_cannot_have_is_told_before_it_begins(keys: dict[str, Any], problem: str) -> None:
    before = workers()
    for build in (check_reward, Grader):
        with pytest.raises(InputError, match=problem):
            build(Reward(**keys), max_response_tokens=100)
    assert workers() == before


def test_a_package_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="'math' needs the package math-verify of the extra math"):
        check_reward(Reward(name="math"), max_response_tokens=9)
    with pytest.raises(InputError, match="use a Grader"):
        get_reward("math")
