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
            return _main(words)
        except KeyboardInterrupt:  # before the command started
            print("megatron-fspo: interrupted", file=sys.stderr)
            return 130
        except ModuleNotFoundError as error:
            if not doctor.is_required(error.name):
                raise
            if words[:1] == ["doctor"] and "verl" not in words:
                findings = doctor.examine()
                print(json.dumps(findings) if "--json" in words else doctor.render(findings))
                return 0
            print(f"megatron-fspo: {doctor.what_is_required(error.name)}", file=sys.stderr)
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
    return exit_status(lambda: int(args.run(args, rest)), "megatron-fspo")


def make_parser() -> OneLineParser:
    """Return the parser of the whole command line; its result has the command's function as ``run``."""
    from megatron_fspo import __version__
    from megatron_fspo.cli import convert, evaluate, init, lab, tools, train

    parser = OneLineParser(prog="megatron-fspo", description="FSPO for LLMs on Megatron-Core.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    init.add_init(commands)
    train.add_train(commands)
    lab.add_plan(commands)
    tools.add_verify(commands)
    lab.add_calibrate(commands)
    evaluate.add_evaluate(commands)
    lab.add_explain(commands)
    lab.add_sweep(commands)
    tools.add_data(commands)
    convert.add_convert(commands)
    tools.add_serve(commands)
    tools.add_status(commands)
    lab.add_report(commands)
    tools.add_doctor(commands)
    return parser
