"""Shared by all commands: how one is declared, its common flags, and the start of its ranks.

A command is an ``add_<name>`` function, which declares its words, with the function it runs beside it. That
gets the arguments and the overrides (``--section.key value``), and returns the exit status. Imports that take
seconds wait in it until the arguments are known to be right.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from megatron_fspo.cli.console import OneLineParser
from megatron_fspo.errors import InputError

Commands: TypeAlias = "argparse._SubParsersAction[OneLineParser]"
Run = Callable[[argparse.Namespace, list[str]], int]
SHUTDOWN_SECONDS = "1800"
"""From SIGTERM to the kill, unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT says otherwise."""


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
    """Declare a command that ``run`` does, and return its parser, for its flags.

    ``text`` is its line in the list of commands; ``description`` and ``epilog`` are its own help, kept as
    they are where the first has several lines. With ``keys`` overrides are arguments, too.
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


def add_config(parser: OneLineParser, text: str = "the run, as TOML", *, required: bool = False) -> None:
    """Declare ``--config``, which may come several times."""
    text = f"{text}; again for files that change keys of those before"
    parser.add_argument("--config", type=Path, action="append", required=required, metavar="FILE", help=text)


def add_nproc(parser: OneLineParser) -> None:
    """Declare ``--nproc``."""
    text = "processes to start here with torchrun (default 1)"
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help=text)


def add_json(parser: OneLineParser) -> None:
    """Declare ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON line")


def world_size(args: argparse.Namespace) -> int:
    """The number of processes of the job: torchrun's, or those that --nproc is about to start."""
    if "WORLD_SIZE" in os.environ:
        if not os.environ["WORLD_SIZE"].isdecimal():
            raise InputError(f"WORLD_SIZE = {os.environ['WORLD_SIZE']!r}: not a number of processes")
        return int(os.environ["WORLD_SIZE"])
    if args.nproc < 1:
        raise InputError(f"--nproc {args.nproc}: must be at least 1")
    return int(args.nproc)


def start_ranks(args: argparse.Namespace) -> None:
    """Become torchrun with the same command line, with ``--nproc``; it starts this program again per rank."""
    if args.nproc == 1 or "WORLD_SIZE" in os.environ:
        return
    words = list(args.argv)
    if "--nproc" in words:  # torchrun would take the word for an abbreviation of its own
        at = words.index("--nproc")
        del words[at : at + 2]
    words = [word for word in words if not word.startswith("--nproc=")]
    # torchrun would set the same and warn about it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.stdout.flush()
    launcher = ["-m", "megatron_fspo.cli.launch", "--standalone", "--nproc-per-node", str(args.nproc)]
    # After SIGTERM torchrun kills ranks that are still there; by its own default after 30 s, in mid-step.
    launcher += ["--shutdown-timeout", os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_SECONDS)]
    os.execv(sys.executable, [sys.executable, *launcher, "-m", "megatron_fspo", *words])
