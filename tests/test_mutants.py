"""The planted faults of tests/mutants.py can still be planted, and their tests are there."""

from __future__ import annotations

import pytest

import kill_worker
from launch import REPO
from mutants import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_its_text_is_there_once_and_its_test_is_there(mutant: Mutant) -> None:
    assert mutant.file(REPO) and mutant.tests(REPO)


def test_every_point_of_the_kill_tests_is_a_function_of_the_package() -> None:
    for point in (*kill_worker.BEFORE, *kill_worker.AFTER, *kill_worker.HALF):
        assert len(list(kill_worker.patches(kill_worker.Place({"point": point})))) == 4
