"""The command init: copies an example that is installed with the package."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import megatron_fspo
from megatron_fspo.cli.command import argument, command
from megatron_fspo.errors import InputError

_INSTALLED = Path(megatron_fspo.__file__).parent / "examples"
EXAMPLES = _INSTALLED if _INSTALLED.is_dir() else _INSTALLED.parents[1] / "examples"
"""In a checkout, the examples are beside the package."""
OWN = "own_task"
NEXT = {
    OWN: "megatron-fspo train --config run.toml",
    "make_sum": "megatron-fspo train --config run.toml --nproc 2",
    "smollm2": "make model and questions, see the head of prepare.py",
    "qwen3_8b": "make the data, see the head of prepare.py",
}
"""Example → next step to do in its folder."""
_MODEL = "make_sum/checkpoint"


@command(
    argument("folder", "folder to create", Path),
    argument("--from", "example to copy (default: own_task)", default=OWN, dest="example", choices=[*NEXT]),
)
def init(args: argparse.Namespace, _: list[str]) -> int:
    """Create a folder for a new task: commented configuration, reward, ten rows of data and a tiny model.

        megatron-fspo init my-task
        cd my-task && megatron-fspo train --config run.toml      # a minute on a CPU

    Then replace model, data and reward by yours. --from copies another example: make_sum, smollm2 or
    qwen3_8b. Exit status 2: the folder exists or cannot be created.
    """
    folder, example = args.folder, EXAMPLES / args.example
    if os.path.lexists(folder):
        raise InputError(f"{folder} exists: name another folder or remove it")
    if not example.is_dir():
        raise InputError(f"{example} does not exist: this installation has no examples")
    try:
        # Shell scripts only work in a checkout.
        shutil.copytree(example, folder, ignore=shutil.ignore_patterns("__pycache__", "*.sh"))
    except (OSError, shutil.Error) as error:
        raise InputError(f"{folder} cannot be made: {error}") from None
    if args.example == OWN:
        shutil.copytree(EXAMPLES / _MODEL, folder / "model")
    for file in folder.rglob("*"):
        if file.suffix in (".toml", ".md", ".py"):
            # Paths become relative to the new folder.
            text = file.read_text(encoding="utf-8")
            file.write_text(text.replace(f"examples/{args.example}/", ""), encoding="utf-8")
    print(f"created {folder}; next, in this folder: {NEXT[args.example]}")
    return 0
