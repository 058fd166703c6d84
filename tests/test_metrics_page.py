"""docs/metrics.md has every metric that the code can emit, and no other.

Names are read from the code; those that it puts together are emitted here, by the functions that do so. Whole
runs check theirs too: ``unknown`` of tests/metrics_page.py is asked in tests of runs.
"""

from __future__ import annotations

import ast
import gc
import re
from collections import Counter
from functools import cache

import torch

from launch import REPO
from megatron_fspo.config import Reward
from megatron_fspo.evaluation.records import Record
from megatron_fspo.evaluation.summary import per_problem, summarize
from megatron_fspo.evaluation.table import metrics_of
from megatron_fspo.mismatch.correction import correction_metrics
from megatron_fspo.mismatch.measure import Mismatch
from megatron_fspo.record.records import SequenceRecord, clip_metrics
from megatron_fspo.rewards import tally
from megatron_fspo.trainer.begin import Filled
from megatron_fspo.trainer.metrics import OFF_POLICY
from megatron_fspo.trainer.noise import AtLength, Calibration, Check, Interval, NoiseRecord
from megatron_fspo.trainer.rollout import COLUMNS, Rollout, rollout_of, sampling_metrics, with_advantages
from megatron_fspo.types import Prompt
from metrics_page import PAGE, ROW, names_of_page, patterns, unknown

GROUPS = ("actor", "critic", "fspo", "perf", "prompt_length", "response_length", "rollout", "timing_s")
GROUPS += ("reward", "training", "val")


@cache
def sources() -> list[ast.AST]:
    """Every node of the package."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((REPO / "megatron_fspo").rglob("*.py"))]
    # Python 3.11 counts the recursion of finalizers that run meanwhile as the parser's, and fails.
    gc.disable()
    try:
        return [node for text in texts for node in ast.walk(ast.parse(text))]
    finally:
        gc.enable()


def is_metric(text: str) -> bool:
    group, _, rest = text.partition("/")
    return group in GROUPS and bool(re.fullmatch(r"[\w/@]+", rest))


def names_in_code() -> set[str]:
    """Literal names of metrics; and phases, which are timed under their names."""
    nodes = sources()
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    names = {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside
        if is_metric(node.value)
    }
    phases = {
        node.args[0].value
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "phase"
        if isinstance(node.args[0], ast.Constant)
    }
    return (names - STEMS) | {f"timing_s/{phase}" for phase in phases}


def templates_in_code() -> set[str]:
    """F-strings that make such names, holes as ``{}``."""
    found = set()
    for node in sources():
        if isinstance(node, ast.JoinedStr):
            text = "".join(p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)
            if text.partition("/")[0] in (*GROUPS, "{}") and "/" in text and " " not in text:
                found.add(text)
    return found


STEMS = {"critic/score", "critic/rewards", "critic/advantages"}
"""Names of columns, of which mean, largest and smallest are emitted."""
OTHER = {"{}/all", "{}/heard", "{}/left", "{}/{}", "{}/{}/{}"} | {
    "{}/came/{}/{}",
    "{}/name/{}",
    "{}/token/{}",
}
"""F-strings of the same form that are no metrics."""


def rollout() -> Rollout:
    table = torch.zeros(4, len(COLUMNS), dtype=torch.float64)
    table[:, COLUMNS.index("lengths")] = torch.tensor([1.0, 2, 3, 4])
    prompts = [Prompt(index=i, token_ids=(1,), text="", answer="") for i in range(2)]
    return with_advantages(rollout_of(prompts, 2, table, {}), torch.tensor([[1.0, -1.0], [0.0, 0.0]]))


def record(length: int) -> SequenceRecord:
    return SequenceRecord(
        sample=0, rank=0, length=length, log_ratio_sum=0.1 * length, advantage=1.0, clipped_low=0.0,
        clipped_high=0.0, dual_clipped=0.0, out_of_band=False, nonfinite=False, ratio=1.0,
    )  # fmt: skip


def corrections() -> set[str]:
    mismatch = Mismatch(sums=torch.zeros(4), lengths=torch.tensor([1, 2, 3, 4]), metrics={})
    words = ("dropped", "truncated_sequences", "truncated_tokens")
    return {name for word in words for name in correction_metrics(word, torch.ones(4, 4), mismatch)}


def evaluation() -> dict[str, float]:
    record = Record(
        dataset="file",
        index=0,
        sample=0,
        response="",
        answer=None,
        score=0.0,
        tokens=1,
        finish_reason="stop",
    )
    return metrics_of(summarize(per_problem([record]), 1))


def emitted() -> dict[str, set[str]]:
    """Template → what it makes, and whatever else its function emits."""
    sampled = rollout()
    columns = set(sampling_metrics(sampled))
    bins = set(clip_metrics([record(length) for length in range(1, 17)], seed=1))
    evaluated = set(evaluation())
    graded = set(tally(Reward(name="math", also={"format": 0.1}, overlong_tokens=8), []))
    dynamic = set(Filled(batch=sampled, sampled=sampled, rounds=1).metrics())
    return {
        "rollout/correction_{}": corrections(),
        "rollout/correction_{}/short": corrections(),
        "rollout/correction_{}/long": corrections(),
        "rollout/dynamic/{}": dynamic,
        "{}/on_policy": {f"{name}/on_policy" for name in OFF_POLICY},
        "fspo/clip_rate/bin_{}": bins,
        "fspo/clip_rate/length_{}": bins,
        "{}/mean": columns,
        "{}/max": columns,
        "{}/min": columns,
        "{}/mean@{}": evaluated,
        "{}/mean@{}/low": evaluated,
        "{}/mean@{}/high": evaluated,
        "{}/pass@{}": evaluated,
        "{}/maj@{}": evaluated,
        "{}/response_length/mean": evaluated,
        "{}/truncated": evaluated,
        "timing_s/{}": set(),  # phases
        "reward/{}": graded,
        "response_length/{}": set(),  # the report reads them
    }


def test_every_metric_of_the_code_is_in_the_page() -> None:
    names = names_in_code() | {name for made in emitted().values() for name in made}
    assert len(names) > 90, "the names are not found"
    assert unknown(sorted(names)) == [], "a row of docs/metrics.md each, please"


def test_every_name_that_is_put_together_is_known_here() -> None:
    found, here = templates_in_code(), set(emitted())
    assert found - here - OTHER == set(), "say in `emitted` what it makes, or in OTHER that it is none"
    assert here - found == set(), "no code makes these any more"


def test_the_page_has_no_metric_that_nobody_emits() -> None:
    names = names_in_code() | {name for made in emitted().values() for name in made} | of_calibrate()
    dead = [row for row, pattern in patterns().items() if not any(pattern.fullmatch(name) for name in names)]
    assert dead == []


def of_calibrate() -> set[str]:
    """Figures with an interval in ``calibration.json``."""
    models = (Calibration, NoiseRecord, AtLength, Check)
    return {
        name
        for model in models
        for name, field in model.model_fields.items()
        if field.annotation in (Interval, Interval | None)
    }


def test_figures_of_calibrate_are_in_the_page() -> None:
    assert len(of_calibrate()) == 10 and unknown(sorted(of_calibrate())) == []


def test_rows_are_whole_and_there_once() -> None:
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    assert [name for name, count in Counter(names_of_page()).items() if count > 1] == []
    for name, rest in rows:
        cells = [cell.strip() for cell in rest.replace(r"\|", "").split("|")]
        assert len(cells) == 3 and all(cells), f"{name}: unit, formula, what a healthy run shows"


def test_a_name_that_is_not_there_is_seen() -> None:
    assert unknown(["step", "actor/lr", "fspo/clip_rate/bin_7", "fspo/new", "val/x/mean@8", "val/x/y/z"]) == [
        "fspo/new",
        "val/x/y/z",
    ]
