"""``make test-fast`` asks every room something: tests that are not ``slow``, and need no vLLM and no GPU."""

from __future__ import annotations

import ast
import re

from launch import REPO

TESTS = REPO / "tests"
LANE = re.search(r'^FAST := -m "(.*)"$', (REPO / "Makefile").read_text(encoding="utf-8"), re.M)[1]  # type: ignore[index]
LEFT_OUT = set(re.findall(r"not (\w+)", LANE))
ELSEWHERE = {"real_vllm", "te", "gpu"}
"""Folders that have lanes of their own."""


def markers(nodes: list[ast.expr]) -> set[str]:
    """Names after ``pytest.mark.`` in expressions."""
    return set(re.findall(r"pytest\.mark\.(\w+)", " ".join(map(ast.unparse, nodes))))


def is_fast(tree: ast.Module) -> bool:
    """Whether a file has a test in the lane."""
    whole = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    return any(
        isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and not LEFT_OUT & markers([*whole, *node.decorator_list])
        for node in tree.body
    )


def test_every_room_is_asked() -> None:
    assert LEFT_OUT == {"slow", "vllm", "gpu"}
    rooms = {path.parent.name for path in (REPO / "megatron_fspo").glob("*/*.py")}
    imported: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if path.parent.name not in ELSEWHERE and is_fast(ast.parse(text)):
            imported |= set(re.findall(r"^ *(?:from|import) megatron_fspo\.(\w+)", text, re.M))
    assert rooms - imported == set()
