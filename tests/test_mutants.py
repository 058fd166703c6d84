"""The planted faults of tests/mutants.py can still be planted, and their tests are there."""

from __future__ import annotations

import pytest

from launch import REPO
from mutants import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_its_text_is_there_once_and_its_test_is_there(mutant: Mutant) -> None:
    assert mutant.file(REPO) and mutant.tests(REPO)


def test_there_are_thirty() -> None:
    assert len(MUTANTS) >= 30
