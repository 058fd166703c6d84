"""Docstrings of functions begin with a verb in the imperative; those of properties are names of values."""

from __future__ import annotations

import ast
from collections import defaultdict

from launch import REPO
from test_layering import read_package

SHARE = 0.8
VERBS = set(
    "Add Allocate Answer Append Arrange Ask Assign Attend Audit Begin Build Call Cancel Check Choose Clip "
    "Close Combine Compare Compute Concatenate Continue Convert Copy Count Create Cut Declare Decode "
    "Describe Digest Discard Disconnect Distribute Do Draw Encode End Estimate Examine Exchange Expand Fill "
    "Follow Format Freeze Fsync Gather Generate Give Group Hand Hash Have Hold Import Insert Interrupt Join "
    "Keep Kill Lay Leave Limit Load Locate Lock Log Look Make Map Mark Measure Merge Multiply Name Note "
    "Open Pack Pad Parse Patch Pause Plan Post Prepare Print Publish Put Raise Read Record Reduce Register "
    "Release Remove Rename Render Replace Reply Report Request Reset Resolve Restore Return Rotate Run "
    "Sample Save Say Score See Select Send Serve Set Share Shorten Show Silence Sort Split Start Stop Store "
    "Sum Switch Take Tell Train Translate Truncate Try Turn Update Verify Wait Warn Wrap Write Yield".split()
)


def test_most_docstrings_begin_with_a_verb() -> None:
    """Of each room, a package or module at the top."""
    begun: dict[str, list[bool]] = defaultdict(list)
    for module, tree in read_package(REPO).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
                names = {ast.unparse(one).rpartition(".")[2] for one in node.decorator_list}
                if not names & {"property", "cached_property"}:
                    begun[module.split(".")[1]].append(text.split()[0].strip(",.:") in VERBS)
    shares = {name: sum(flags) / len(flags) for name, flags in begun.items()}
    assert {name: share for name, share in shares.items() if share < SHARE} == {}
