"""examples/smollm2 and its page: what needs no model. `make real` runs the rest."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import real_model

REPO = Path(__file__).parents[2]
EXAMPLE = REPO / "examples/smollm2"
sys.path.insert(0, str(EXAMPLE))
import prepare  # noqa: E402


@pytest.mark.parametrize("digits", prepare.SETS.values())
def test_no_question_is_trained_on_and_held_out(digits: int) -> None:
    held_out = prepare.questions(digits, 60, prepare.HELD_OUT_SEED)
    train = prepare.questions(digits, 100, prepare.TRAIN_SEED, without=[row["prompt"] for row in held_out])
    prompts = [row["prompt"] for row in (*held_out, *train)]
    assert len(set(prompts)) == len(prompts) == 160
    assert held_out == prepare.questions(digits, 60, prepare.HELD_OUT_SEED)


def test_the_page_has_the_figures_of_the_results() -> None:
    results = json.loads((REPO / "benchmarks/results/real_model.json").read_text(encoding="utf-8"))
    page = (REPO / "docs/real_model.md").read_text(encoding="utf-8")
    assert real_model.table(results["runs"]) in page
    assert real_model.steps_table(results["runs"]) in page
    assert real_model.clip_table(results["runs"]) in page
    adapters = json.loads((REPO / "benchmarks/results/real_model_lora.json").read_text(encoding="utf-8"))
    assert real_model.gains_table(adapters["runs"]) in page
