"""``make test-fast`` asks every room something: tests that are not ``slow``, and need no vLLM and no GPU."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from launch import REPO

TESTS = REPO / "tests"
LEFT_OUT = {"slow", "vllm", "gpu"}
ELSEWHERE = {"real_vllm", "te", "gpu"}
"""Folders that have lanes of their own."""


def markers(node: ast.AST) -> set[str]:
    """Names after ``pytest.mark.`` in an expression."""
    return {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        if isinstance(part.value, ast.Attribute) and part.value.attr == "mark"
    }


def fast_tests(tree: ast.Module) -> list[str]:
    """Names of the tests of a file that are in the lane."""
    whole: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            whole = markers(node.value)
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if not LEFT_OUT & whole.union(*map(markers, node.decorator_list))
    ]


@cache
def fast_files() -> dict[Path, ast.Module]:
    """Files with tests in the lane."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in TESTS.rglob("test_*.py")}
    return {path: tree for path, tree in trees.items() if fast_tests(tree)}


def test_every_room_is_asked() -> None:
    rooms = {path.parent.name for path in (REPO / "megatron_fspo").glob("*/*.py")}
    imported = {
        name
        for path, tree in fast_files().items()
        if path.parent.name not in ELSEWHERE
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in re.findall(r"megatron_fspo\.(\w+)", ast.unparse(node))
    }
    assert {"objective", "mcore", "verify"} <= rooms
    assert rooms - imported == set()


def test_a_marked_test_is_not_counted() -> None:
    tree = ast.parse(
        "@pytest.mark.slow\ndef test_a(): ...\n@pytest.mark.parametrize('x', [1])\ndef test_b(x): ...\n"
    )
    assert fast_tests(tree) == ["test_b"]
    assert fast_tests(ast.parse("pytestmark = [pytest.mark.vllm]\ndef test_a(): ...")) == []


def test_the_makefile_leaves_out_what_is_left_out_here() -> None:
    (words,) = re.findall(r'^FAST := -m "(.*)"$', (REPO / "Makefile").read_text(encoding="utf-8"), re.M)
    assert set(re.findall(r"not (\w+)", words)) == LEFT_OUT
