"""Declares commands and their common flags, and starts ranks.

A command is a pair of functions. ``add_<name>`` declares its arguments; its ``run`` function gets these and
the overrides (``--section.key value``), checks them before slow imports, and returns the exit status.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from megatron_fspo.cli.console import OneLineParser
from megatron_fspo.errors import InputError

Commands: TypeAlias = "argparse._SubParsersAction[OneLineParser]"
Run = Callable[[argparse.Namespace, list[str]], int]
SHUTDOWN_SECONDS = "1800"
"""Time from SIGTERM to SIGKILL; TORCH_ELASTIC_SHUTDOWN_TIMEOUT overrides it."""


def add(
    commands: Commands,
    name: str,
    run: Run,
    text: str,
    description: str | None = None,
    *,
    epilog: str | None = None,
    keys: bool = False,
) -> OneLineParser:
    """Declare a command and return its parser.

    ``run`` is its function, ``text`` its line in the list of commands. ``description`` and ``epilog`` are its
    own help, not re-wrapped if the description has several lines. With ``keys`` it accepts overrides.
    """
    raw = description is not None and "\n" in description
    parser = commands.add_parser(
        name,
        help=text,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter if raw else argparse.HelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, keys=keys)
    return parser


def add_config(parser: OneLineParser, text: str = "configuration (TOML)", *, required: bool = False) -> None:
    """Declare ``--config``, which may be repeated."""
    text = f"{text}; may be repeated: later files override keys of earlier ones"
    parser.add_argument("--config", type=Path, action="append", required=required, metavar="FILE", help=text)


def add_nproc(parser: OneLineParser) -> None:
    text = "number of processes to start on this machine with torchrun (default 1)"
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help=text)


def add_json(parser: OneLineParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON line")


def world_size(args: argparse.Namespace) -> int:
    """Return the number of processes of the job: torchrun's, or ``--nproc``."""
    if "WORLD_SIZE" in os.environ:
        if not os.environ["WORLD_SIZE"].isdecimal():
            raise InputError(f"WORLD_SIZE = {os.environ['WORLD_SIZE']!r}: must be a number of processes")
        return int(os.environ["WORLD_SIZE"])
    if args.nproc < 1:
        raise InputError(f"--nproc {args.nproc}: must be at least 1")
    return int(args.nproc)


def start_ranks(args: argparse.Namespace) -> None:
    """With ``--nproc``, replace this process by torchrun, which runs the same command line on every rank."""
    if args.nproc == 1 or "WORLD_SIZE" in os.environ:
        return
    words = list(args.argv)
    if "--nproc" in words:  # torchrun would read it as an abbreviation of its own flag
        at = words.index("--nproc")
        del words[at : at + 2]
    words = [word for word in words if not word.startswith("--nproc=")]
    # torchrun would set the same value with a warning.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.stdout.flush()
    os.execv(sys.executable, launcher(args.nproc, words))


def launcher(nproc: int, words: Sequence[str]) -> list[str]:
    """Return the command that runs ``megatron-fspo`` with ``words`` on ``nproc`` ranks of this machine, which
    meet at a loopback address."""
    options = ["--rdzv-endpoint", "127.0.0.1:0", "--nproc-per-node", str(nproc)]
    # torchrun kills ranks that still run 30 s after SIGTERM by default, which may be in the middle of a step.
    options += ["--shutdown-timeout", os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_SECONDS)]
    return [sys.executable, "-m", "megatron_fspo.cli.launch", *options, "-m", "megatron_fspo", *words]
