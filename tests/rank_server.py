"""Forks ranks from a process that has torch and Megatron imported: 3 s less CPU time for each of them.

rank_client.py starts two of these, and talks to them in lines of JSON. A request names the program, its
working directory, its environment and the files that its output goes to; the answer is the rank's process id,
and later its exit status. At the end of the requests the ranks that are left are killed.
"""

from __future__ import annotations

import gc
import json
import os
import random
import runpy
import select
import signal
import sys
from pathlib import Path
from typing import Any

import numpy

# wandb, which Megatron imports where it is installed, makes a temporary folder at its import, and every
# process forked later removes it at its exit: the ranks that need wandb import it themselves.
sys.modules["wandb"] = None  # type: ignore[assignment]

# What a rank imports at its start or on its way.
import torch._dynamo  # noqa: E402
import torch.distributed.checkpoint  # noqa: E402, F401
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: E402, F401

from megatron_fspo.mcore import leave_uncompiled  # noqa: E402

leave_uncompiled()  # as the command line does

import megatron_fspo.lab.report.page  # noqa: E402
import megatron_fspo.trainer.loop  # noqa: E402

del sys.modules["wandb"]


def say(**words: Any) -> None:
    os.write(1, json.dumps(words).encode() + b"\n")


def start(request: dict[str, Any], living: set[int]) -> list[str] | None:
    """Fork a rank; returns its program in the new process, and None in this one once its id is told."""
    pid = os.fork()
    # Of its own group, in both processes: whichever comes first.
    os.setpgid(pid, pid)
    if pid:
        say(started=pid)
        living.add(pid)
        return None
    for number, file in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
        opened = os.open(file, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    random.seed()
    numpy.random.seed()
    program: list[str] = request["program"]
    return program


def next_rank(living: set[int]) -> list[str]:
    """Serve, and return only in a new rank, with its program."""
    lines = b""
    while True:
        for pid in list(living):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                living.remove(pid)
                say(ended=pid, status=os.waitstatus_to_exitcode(status))
        if not select.select([0], [], [], 0.02 if living else None)[0]:
            continue
        read = os.read(0, 1 << 20)
        if not read:
            for pid in living:
                os.killpg(pid, signal.SIGKILL)
            os._exit(0)
        *complete, lines = (lines + read).split(b"\n")
        for line in complete:
            if (program := start(json.loads(line), living)) is not None:
                return program


def run(program: list[str]) -> None:
    """As ``python program...`` does; but a run draws its report, for 1.5 s, only if it is told to."""
    if "DRAW_REPORT" not in os.environ:
        megatron_fspo.lab.report.page.write_report = lambda folder: folder  # type: ignore[assignment]
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    kept = [path for path in sys.path[1:] if path not in paths]
    if program[0] == "-m":
        sys.path = [os.getcwd(), *paths, *kept]
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.path = [str(Path(program[0]).resolve().parent), *paths, *kept]
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    gc.collect()
    gc.freeze()  # nothing of all this is garbage, and ranks look for that each time they leave a layout
    run(next_rank(set()))
