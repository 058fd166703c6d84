"""Declares commands and their arguments, and starts ranks."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from megatron_fspo.cli.console import OneLineParser, say
from megatron_fspo.errors import InputError

Commands: TypeAlias = "argparse._SubParsersAction[OneLineParser]"
Run = Callable[[argparse.Namespace, list[str]], int]
Argument = Callable[[argparse._ActionsContainer], object]
"""Adds itself to a parser."""
SHUTDOWN_SECONDS = "1800"
"""Time from SIGTERM to SIGKILL; TORCH_ELASTIC_SHUTDOWN_TIMEOUT overrides it."""


@dataclass(frozen=True)
class Command:
    """A command: its arguments and its function."""

    arguments: tuple[Argument, ...]
    keys: bool
    """Whether it accepts overrides of configuration keys."""
    epilog: str | None
    run: Run
    """Gets the arguments and the overrides (``--section.key value``), checks them before slow imports, and
    returns the exit status. Its name is that of the command, its docstring the help."""

    def add_to(self, commands: Commands, text: str) -> None:
        """Add the parser of this command; ``text`` is its line in the list of commands."""
        parser = commands.add_parser(
            self.run.__name__.replace("_", "-"),
            help=text,
            description=inspect.getdoc(self.run),
            epilog=self.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.set_defaults(run=self.run, keys=self.keys)
        for add in self.arguments:
            add(parser)
        if self.keys and "_ARGCOMPLETE" in os.environ:
            from megatron_fspo.config.loading import legal_keys

            for key in dict.fromkeys(key for key, *_ in legal_keys()):
                parser.add_argument(f"--{key.replace('_', '-')}")


def command(*arguments: Argument, keys: bool = False, epilog: str | None = None) -> Callable[[Run], Command]:
    """Make a function a command; the fields of :class:`Command` say what the arguments are."""
    return lambda run: Command(arguments, keys, epilog, run)


def argument(words: str, text: str, kind: Any = None, default: Any = None, **more: Any) -> Argument:
    """Return an argument that is written as in ``words``: ``--flag METAVAR``, or ``name METAVAR`` by place.
    A flag without METAVAR and choices is a switch. The help names the default; ``more`` is for argparse."""
    name, _, metavar = words.partition(" ")
    if not metavar and name.startswith("--") and "choices" not in more:
        return lambda parser: parser.add_argument(name, help=text, action="store_true")
    if default is not None and "nargs" not in more and "default" not in text:
        text += f" (default {default})"
    how = {"metavar": metavar or None, "type": kind, "default": default, **more}
    return lambda parser: parser.add_argument(name, help=text, **how)


def either(*arguments: Argument) -> Argument:
    """Return arguments that exclude each other."""

    def add(parser: argparse._ActionsContainer) -> None:
        group = parser.add_mutually_exclusive_group()
        for argument in arguments:
            argument(group)

    return add


def config_files(text: str = "configuration (TOML)", *, required: bool = False) -> Argument:
    """Return ``--config``, which may be repeated."""
    text = f"{text}; may be repeated: later files override keys of earlier ones"
    return argument("--config FILE", text, Path, action="append", required=required)


NPROC = argument("--nproc N", "number of processes to start on this machine with torchrun", int, 1)
JSON = argument("--json", "print one JSON line")


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
    say(f"starting {args.nproc} ranks", error=False)
    sys.stdout.flush()
    os.execv(sys.executable, launcher(args.nproc, words))


def launcher(nproc: int, words: Sequence[str]) -> list[str]:
    """Return the command that runs ``megatron-fspo`` with ``words`` on ``nproc`` ranks of this machine, which
    meet at a loopback address."""
    options = ["--rdzv-endpoint", "127.0.0.1:0", "--nproc-per-node", str(nproc)]
    # torchrun kills ranks that still run 30 s after SIGTERM by default, which may be in the middle of a step.
    options += ["--shutdown-timeout", os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_SECONDS)]
    return [sys.executable, "-m", "megatron_fspo.cli.launch", *options, "-m", "megatron_fspo", *words]
