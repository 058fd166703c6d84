"""docs/metrics.md has every metric that the code can emit, and no other.

Names are read from the code: literals, and f-strings, whose holes stand for anything. Whole runs check the
names that these make: ``unknown`` of tests/metrics_page.py is asked in tests of runs.
"""

from __future__ import annotations

import ast
import gc
import re
from collections import Counter
from functools import cache

from launch import REPO
from megatron_fspo.trainer.noise import AtLength, Calibration, Check, FlipNoise, Interval, NoiseRecord
from metrics_page import PAGE, ROW, names_of_page, patterns, unknown

GROUPS = ("actor", "critic", "fspo", "perf", "prompt_length", "response_length", "rollout", "timing_s")
GROUPS += ("environment", "reward", "router", "training", "val")


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


@cache
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


STEMS = {"critic/score", "critic/rewards", "critic/advantages"}
STEMS |= {"environment/turns", "environment/rows", "perf/environment_seconds"}
"""Names of columns, of which mean, largest and smallest are emitted."""


READ = {"fspo/{}"}
"""F-strings by which rows are read, not made."""


@cache
def made_names() -> dict[str, re.Pattern[str]]:
    """F-strings that begin with a group or a hole and have a word in them: what they can make."""
    found = {}
    for node in sources():
        if isinstance(node, ast.JoinedStr):
            text = "".join(p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)
            if text.partition("/")[0] in (*GROUPS, "{}") and re.fullmatch(r"[\w/@{}]+[a-z][\w/@{}]*", text):
                found[text] = re.compile(re.escape(text).replace(r"\{\}", ".+"))
    return {text: pattern for text, pattern in found.items() if text not in READ}


def test_every_metric_of_the_code_is_in_the_page() -> None:
    assert len(names_in_code()) > 60, "the names are not found"
    assert unknown(sorted(names_in_code())) == [], "a row of docs/metrics.md each, please"
    of_a_group = {text: pattern for text, pattern in made_names().items() if text[0] != "{"}
    assert len(of_a_group) > 5
    page = names_of_page()
    assert [text for text, made in of_a_group.items() if not any(map(made.fullmatch, page))] == []


def is_emitted(row: str, pattern: re.Pattern[str]) -> bool:
    literal = any(map(pattern.fullmatch, names_in_code() | of_calibrate()))
    return literal or any(made.fullmatch(row) for made in made_names().values())


def test_the_page_has_no_metric_that_nobody_emits() -> None:
    assert [row for row, pattern in patterns().items() if not is_emitted(row, pattern)] == []
    assert not is_emitted("fspo/dead", re.compile("fspo/dead"))


def of_calibrate() -> set[str]:
    """Figures with an interval in ``calibration.json``."""
    models = (Calibration, NoiseRecord, FlipNoise, AtLength, Check)
    return {
        name
        for model in models
        for name, field in model.model_fields.items()
        if field.annotation in (Interval, Interval | None)
    }


def test_figures_of_calibrate_are_in_the_page() -> None:
    assert len(of_calibrate()) == 11 and unknown(sorted(of_calibrate())) == []


def test_rows_are_whole_and_there_once() -> None:
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    assert [name for name, count in Counter(names_of_page()).items() if count > 1] == []
    for name, rest in rows:
        cells = [cell.strip() for cell in rest.replace(r"\|", "").split("|")]
        assert len(cells) == 3 and all(cells), f"{name}: unit, formula, what a healthy run shows"
