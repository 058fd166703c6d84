"""Writes docs/faults.md from the tests: ``python docs/make_faults.py``."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = Path(__file__).with_name("faults.md")
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/verify")]

HEAD = """\
# What verify catches

Each of these faults is put into the production code on all ranks of a layout, one at a time; `verify`
must fail and name its cause first; without the fault the same case must pass.
`make test PYTEST_ARGS=tests/verify/test_faults.py` runs them on four gloo processes, in float64 and float32
({one} of {all} show in one of the two only). Made by `make docs` from `tests/verify/faults_of_loss.py` and
`faults_of_model.py`.

| fault | on | cause that is named first |
|---|---|---|
"""


def render() -> str:
    """The page."""
    from faults import FAULTS

    rows = []
    for fault in FAULTS.values():
        text = (inspect.getdoc(fault.patch) or "").partition("\n\n")[0].replace("\n", " ").rstrip(".")
        rows.append(f"| {text} | {fault.layout}{', tied' if fault.tied else ''} | {fault.cause} |")
    one = sum(len(fault.dtypes) == 1 for fault in FAULTS.values())
    return HEAD.format(one=one, all=len(FAULTS)) + "\n".join(rows) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
