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
from collections.abc import Sequence

from megatron_fspo.cli import doctor
from megatron_fspo.cli.console import OneLineParser, exit_status, quiet_megatron


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
    parser = make_parser()
    args, rest = parser.parse_known_args(words)
    args.argv = words
    # `verify` accepts configuration keys only with --config.
    if rest and not (args.keys and args.config if args.command == "verify" else args.keys):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return int(args.run(args, rest))


def make_parser() -> OneLineParser:
    """Return the parser of the whole command line; its result has the command's function as ``run``."""
    from megatron_fspo import __version__
    from megatron_fspo.cli import convert, evaluate, init, lab, tools, train, verify_checkpoint

    parser = OneLineParser(prog="megatron-fspo", description="FSPO for LLMs on Megatron-Core.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (
        init.init,
        train.train,
        lab.plan,
        tools.verify,
        lab.calibrate,
        evaluate.evaluate,
        lab.explain,
        lab.sweep,
    ):
        command.add_to(commands)
    data = commands.add_parser("data", help="check data files")
    tools.check.add_to(data.add_subparsers(dest="action", required=True))
    between = commands.add_parser("convert", help="convert or compare Hugging Face and Megatron checkpoints")
    actions = between.add_subparsers(dest="action", required=True)
    for action in (convert.hf_to_megatron, convert.megatron_to_hf, verify_checkpoint.verify):
        action.add_to(actions)
    for command in (tools.serve, tools.status, lab.report, tools.doctor):
        command.add_to(commands)
    return parser
