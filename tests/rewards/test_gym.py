"""``reasoning_gym``: rows, scores as the package has them, and its scorers without ``eval``."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from answers import STOPPED, code, prompt

from launch import environment
from megatron_fspo.config import Reward
from megatron_fspo.errors import InputError
from megatron_fspo.rewards import Failure, Grade, Grader
from megatron_fspo.rewards.gym import _plain, gym_rows
from megatron_fspo.rewards.gym_worker import FORMULA, LITERAL, check_formula, rich

# The package leaves its data files to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    """Imports the package: two seconds."""
    config = Reward(name="reasoning_gym", extract="whole", workers=2, seconds=10.0)
    with Grader(config, max_response_tokens=100) as grader:
        yield grader


def ask(grader: Grader, row: dict[str, Any], response: str) -> Future[Grade | Failure]:
    fields = json.loads(json.dumps(row))
    return grader.submit(prompt(fields["answer"], fields=fields), STOPPED, response)


def score(future: Future[Grade | Failure]) -> float:
    found = future.result(timeout=60)
    assert isinstance(found, Grade), found
    assert not found.timed_out
    return found.score


def test_a_row_has_json_types_and_goes_to_the_packages_scorer(grader: Grader) -> None:
    rows = list(gym_rows("leg_counting", size=3, seed=1))
    assert rows == list(gym_rows("leg_counting", size=3, seed=1))
    assert [set(row) for row in rows] == [{"prompt", "answer", "task", "config", "metadata"}] * 3
    assert all(isinstance(value, str) for row in rows for value in row.values())
    for row in rows:
        assert score(ask(grader, row, row["answer"])) == 1.0
        assert score(ask(grader, row, "many")) < 0.1


def test_settings_reach_questions_and_scorer(grader: Grader) -> None:
    """puzzle24's scorer looks at its own."""
    (row,) = gym_rows("puzzle24", size=1, seed=1, min_value=2, max_value=9)
    assert json.loads(row["config"]) == {"min_value": 2, "max_value": 9}
    assert score(ask(grader, row, "1 * 2 * 3 * 4")) == 0.01, "1 is no number of this game"
    (row,) = gym_rows("puzzle24", size=1, seed=1)
    assert score(ask(grader, row, "1 * 2 * 3 * 4")) == 1.0


def test_the_answer_is_taken_out_of_the_response_first() -> None:
    (row,) = gym_rows("leg_counting", size=1, seed=1)
    with Grader(Reward(name="reasoning_gym", workers=1, seconds=10.0), max_response_tokens=9) as grader:
        assert score(ask(grader, row, f"So \\boxed{{{row['answer']}}}")) == 1.0
        found = ask(grader, row, row["answer"]).result(timeout=60)
    assert isinstance(found, Grade) and (found.score, found.parsed, found.answer) == (0.0, False, None)


def test_a_scorer_that_raises_for_an_answer_says_0(grader: Grader) -> None:
    (row,) = gym_rows("prime_factorization", size=1, seed=1)
    found = ask(grader, row, "no number").result(timeout=60)
    assert isinstance(found, Grade) and (found.score, found.parsed) == (0.0, False)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"task": "no_such_task"}, "ValueError: Dataset 'no_such_task' not registered"),
        ({"config": '{"n": 0}'}, "AssertionError: n must be between"),
        ({"metadata": "{}"}, "KeyError: 'valid_answers'"),
        ({"metadata": "{"}, "JSONDecodeError: "),
    ],
)
def test_a_row_that_is_no_good_is_a_failure(grader: Grader, change: dict[str, str], problem: str) -> None:
    (row,) = gym_rows("n_queens", size=1, seed=1)
    found = ask(grader, row | change, "17").result(timeout=60)
    assert isinstance(found, Failure)
    assert found.problem.startswith(f"raised BadRowError: cannot score the row's own answer: {problem}")


def test_a_prompt_of_another_file_is_a_failure(grader: Grader) -> None:
    found = grader.submit(prompt("5"), STOPPED, "5").result(timeout=60)
    assert isinstance(found, Failure) and "field 'task'" in found.problem and "gym_rows" in found.problem


@pytest.mark.parametrize(
    ("task", "config", "problem"),
    [
        ("no_such_task", {}, "not registered"),
        ("leg_counting", {"legs": 3}, "legs"),
        ("leg_counting", {"min_animals": -1}, "min_animals"),
        ("composite", {}, "not supported"),
    ],
)
def test_rows_that_cannot_be_had(task: str, config: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        gym_rows(task, size=1, seed=1, **config)


def test_what_json_has_no_word_for() -> None:
    value = {"a": (1, (2, [3])), "b": {1: "x", (2, 3): None}, "c": {4, 5}, "d": [1.5, True]}
    assert rich(json.loads(json.dumps(_plain(value)))) == value
    with pytest.raises(TypeError, match="has no JSON form"):
        _plain(object())


@pytest.mark.parametrize("task", [*LITERAL, *FORMULA])
def test_scorers_that_evaluate_get_no_code(grader: Grader, task: str, tmp_path: Path) -> None:
    file = tmp_path / "written"
    (row,) = gym_rows(task, size=1, seed=3)
    assert score(ask(grader, row, row["answer"])) in (1.0, 0.01)
    for text in code(file):
        assert score(ask(grader, row, text)) < 0.1
        assert score(ask(grader, row, f"{row['answer']} + {text}")) < 0.1
    assert not file.exists()


@pytest.mark.slow
def test_scorers_are_harmless_without_the_workers_limits_too(tmp_path: Path) -> None:
    """In a process where nothing else would stop them."""
    file = tmp_path / "written"
    asked = [(row, code(file)) for task in (*LITERAL, *FORMULA) for row in gym_rows(task, size=1, seed=3)]
    script = (
        "import json, sys\n"
        "from megatron_fspo.rewards.gym_worker import score\n"
        "for row, texts in json.load(sys.stdin):\n"
        "    for text in texts:\n"
        "        assert score(json.dumps(row), text)[0] < 0.1\n"
        "print('done')\n"
    )
    shown = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        input=json.dumps(asked),
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert shown.stdout.endswith("done\n"), shown.stderr
    assert list(tmp_path.iterdir()) == []


def test_literals_are_still_read(grader: Grader) -> None:
    (row,) = gym_rows("string_insertion", size=1, seed=3)
    assert score(ask(grader, row, repr(list(row["answer"])))) == 0.1


FORMULAS = "x**2/2 + sin(2*x) - C|1.5e3*x|(3 + 4)*2|sqrt(x)**(1/2) + log(x, 2)|-5!"
NO_FORMULAS = "x.diff|().__class__|x . real|__import__('os')|a_b|open(x)|'a'|x[0]|{x}|x; y|lambda x|x = 1"
NO_FORMULAS += "|x if y else z|print(x)|\\frac{1}{2}|ｅｖａｌ(x)|S('x')|@x"


def test_formulas() -> None:
    for text in FORMULAS.split("|"):
        check_formula(text)
    for text in NO_FORMULAS.split("|"):
        with pytest.raises(ValueError, match="not a formula"):
            check_formula(text)


@pytest.mark.slow
def test_every_task_scores_as_the_package_does(grader: Grader) -> None:
    """Through JSON and a worker. And no other scorer has learned to evaluate: the pages name nine."""
    from reasoning_gym.factory import DATASETS, create_dataset

    asked = []
    for task in sorted(set(DATASETS) - {"composite", "game_of_life_halting"}):
        dataset = create_dataset(task, size=2, seed=7)
        for index, row in enumerate(gym_rows(task, size=2, seed=7)):
            for answer in {row["answer"] or "nothing", "nonsense 17", "[1, 2]"}:
                try:
                    expected = dataset.score_answer(answer, dataset[index])
                except Exception:  # of text that is no answer
                    expected = 0.0
                asked.append((task, answer, expected, ask(grader, row, answer)))
    assert len(asked) > 500
    wrong = [(task, answer) for task, answer, expected, future in asked if score(future) != expected]
    assert wrong == []


def test_the_nine_are_all_that_evaluate() -> None:
    """Read from the sources of the scorers."""
    from reasoning_gym.factory import DATASETS

    found = set()
    for task, (dataset, _) in DATASETS.items():
        tree = ast.parse("class A:\n" + inspect.getsource(dataset.score_answer))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).split(".")[-1]
                given = ", ".join(map(ast.unparse, node.args)) + ","
                if name in ("eval", "exec", "parse_expr", "sympify", "S") and re.search(r"answer[),]", given):
                    found.add(task)
    # It evaluates its own answer where that is no JSON.
    assert found - {"number_sorting"} == {*LITERAL, *FORMULA}
