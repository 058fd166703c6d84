"""``megatron-fspo init | train | plan | verify | calibrate | evaluate | explain | sweep | data | convert |
serve | status | report | doctor``.

Exit status: 0 success; 1 the run or check failed; 2 invalid arguments or input, reported in one line; 130
interrupted by Ctrl-C; 141 stdout was closed; 143 stopped by SIGTERM, with a checkpoint to resume from.
"""

from __future__ import annotations

import json
import os
import select
import sys
from argparse import SUPPRESS, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module

from megatron_fspo.cli import doctor
from megatron_fspo.cli.console import OneLineParser, exit_status, quiet_megatron

COMMANDS = {
    "init": ("init", "create a folder for a new task"),
    "train": ("train", "train a policy"),
    "sweep": ("lab", "run several arms and seeds, and compare them"),
    "serve": ("tools", "run vLLM servers for rollouts"),
    "doctor": ("tools", "show what is installed, what a run would use, and what is missing"),
    "plan": ("lab", "estimate memory and time of a run"),
    "verify": ("checks", "check the gradient of parallel layouts"),
    "calibrate": ("lab", "measure how much of S is noise"),
    "data check": ("checks", "row counts, duplicates, lengths, errors"),
    "status": ("tools", "show what a run is doing, rank by rank"),
    "report": ("lab", "write the report of a run, or of several compared"),
    "evaluate": ("evaluate", "measure the accuracy of a checkpoint"),
    "explain": ("lab", "compare what losses clip in a dump of responses"),
    "push": ("lab", "upload the model of a run, with a card"),
    "convert hf-to-megatron": ("convert", "write a Megatron distributed checkpoint"),
    "convert megatron-to-hf": ("convert", "write a Hugging Face checkpoint"),
    "convert verify": ("verify_checkpoint", "compare two checkpoints bit by bit"),
}
"""Command → its module in this package, and its line in the list of commands."""
_HEADINGS = {"init": "train", "doctor": "before a run", "status": "results", "push": "checkpoints"}
"""Command → heading above its line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status. A missing package is reported in one line."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        try:
            return exit_status(lambda: _main(words), "megatron-fspo")
        except ModuleNotFoundError as error:
            if (problem := doctor.missing_package(error.name)) is None:
                raise
            if words[:1] == ["doctor"] and "verl" not in words:
                findings = doctor.examine()
                print(json.dumps(findings) if "--json" in words else doctor.render(findings))
                return 0
            print(f"megatron-fspo: {problem}", file=sys.stderr)
            return 2
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        readers = select.poll()
        readers.register(sys.stdout, 0)
        if not readers.poll(0):  # another pipe broke, such as a worker's
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 141


def _main(words: list[str]) -> int:
    quiet_megatron()
    completing = "_ARGCOMPLETE" in os.environ
    parser = make_parser(os.environ["COMP_LINE"].split()[1:] if completing else words)
    if completing:
        from argcomplete import autocomplete  # a user who has its hook in the shell has the package

        autocomplete(parser)
    args, rest = parser.parse_known_args(words)
    args.argv = words
    # `verify` accepts configuration keys only with --config.
    if rest and not (args.keys and args.config if args.command == "verify" else args.keys):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return int(args.run(args, rest))


def make_parser(words: Sequence[str] | None = None) -> OneLineParser:
    """Return the parser of the whole command line; its result has the command's function as ``run``. With
    ``words``, only the module of their command is imported; the parsers of the others have no arguments."""
    from megatron_fspo import __version__

    listed = ""
    for name, (_, text) in COMMANDS.items():
        listed += f"\n{_HEADINGS[name]}:\n" if name in _HEADINGS else ""
        listed += f"  {name:<23} {text}\n"
    parser = OneLineParser(
        prog="megatron-fspo",
        usage="megatron-fspo [-h] [--version] COMMAND ...",
        description=f"FSPO for LLMs on Megatron-Core; COMMAND --help has arguments and examples.\n{listed}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", prog="megatron-fspo", required=True, help=SUPPRESS)
    groups = {"": commands}
    for words_of, (module, text) in COMMANDS.items():
        group, _, name = words_of.rpartition(" ")
        if group not in groups:
            parent = commands.add_parser(group)
            groups[group] = parent.add_subparsers(dest="action", required=True)
        if words is None or words[: len(words_of.split())] == words_of.split():
            command = getattr(import_module(f"megatron_fspo.cli.{module}"), name.replace("-", "_"))
            command.add_to(groups[group], text)
        else:
            groups[group].add_parser(name, help=text)
    return parser
