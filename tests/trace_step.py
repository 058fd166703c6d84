"""Counts the files and functions of the package that one training step enters, in a real run.

python tests/trace_step.py          # three numbers
python tests/trace_step.py --list   # and the files, with the functions entered in each

The run is examples/make_sum on one process with the embedded engine; its second step is measured, and the
second optimizer step in that, of one micro-batch. Threads, lambdas and comprehensions do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from types import FrameType
from typing import Any

from launch import REPO

PACKAGE = f"{REPO}/megatron_fspo/"
STEP = ("trainer/loop.py", "train_step")
UPDATE = ("trainer/optimize.py", "update")
"""The functions that a step and an optimizer step are, by file and name."""

WORDS = (
    "train --config examples/make_sum/run.toml --run.name traced --run.steps 2 --evaluation.every 0 "
    "--parallel.tensor 1 --parallel.sequence false --batch.max-tokens 100000 --rollout.prompts 16"
).split()
"""A mini-batch fits into one micro-batch."""

Functions = set[tuple[str, str]]
"""File in the package, and qualified name."""


class Tracer:
    """A profile function that keeps what is entered between the call and the return of two functions."""

    def __init__(self) -> None:
        self.step: Functions = set()
        self.update: Functions = set()
        self.entered = {STEP: 0, UPDATE: 0}
        self.open: set[tuple[str, str]] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE):
            return
        entry = (code.co_filename.removeprefix(PACKAGE), code.co_qualname)
        if event == "return":
            self.open.discard(entry)
            return
        if entry in self.entered:
            self.entered[entry] += STEP == entry or STEP in self.open
            if self.entered[entry] == 2:
                self.open.add(entry)
        if STEP not in self.open or self.entered[STEP] != 2:
            return
        if code.co_name.startswith("<"):
            return
        self.step.add(entry)
        if UPDATE in self.open:
            self.update.add(entry)


def traced() -> tuple[Functions, Functions]:
    """Functions that a training step enters, and those that an optimizer step in it enters."""
    from megatron_fspo.cli import main

    tracer = Tracer()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        sys.setprofile(tracer)
        try:
            status = main([*WORDS, "--run.folder", folder])
        finally:
            sys.setprofile(None)
    if status or not tracer.update:
        raise SystemExit(f"exit status {status}; entered: {tracer.entered}")
    return tracer.step, tracer.update


def files(functions: Functions) -> list[str]:
    return sorted({file for file, _ in functions})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--list", action="store_true", help="the files and functions too")
    listed = parser.parse_args().list
    step, update = traced()
    print(f"a training step: {len(files(step))} files, {len(step)} functions")
    print(f"an optimizer step on one micro-batch: {len(files(update))} files")
    for title, functions in (("training step", step), ("optimizer step", update)) if listed else ():
        print(f"\n{title}")
        for file in files(functions):
            print(f"  {file}: {', '.join(sorted(name for own, name in functions if own == file))}")


if __name__ == "__main__":
    main()
