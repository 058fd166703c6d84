"""The arguments of ``sweep``, and what it does."""

from __future__ import annotations

import argparse
from pathlib import Path

_HELP = """\
Make several runs from one file, arms x seeds, and say what came of them, with intervals over seeds.

All of it:                megatron-fspo sweep sweep.toml
Four runs at a time:      megatron-fspo sweep sweep.toml --jobs 4
Change a key of all runs: megatron-fspo sweep sweep.toml --run.steps 4

The same command goes on where a killed one stopped: runs that are there are not made again. docs/running.md
has the file. Exit status 1: runs failed; the others are made all the same.
"""


def add_sweep(commands: argparse._SubParsersAction) -> None:
    """Give the command line this command."""
    sweep = commands.add_parser(
        "sweep",
        help="several runs from one file, compared",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    sweep.add_argument("file", type=Path, help="TOML: config, folder, seeds, arms")
    sweep.add_argument("--jobs", type=_count, metavar="N", help="runs at a time (default: the file's)")
    sweep.set_defaults(run=run)


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    """0 once all runs are made."""
    from megatron_fspo.lab.sweep.file import read_sweep
    from megatron_fspo.lab.sweep.processes import make
    from megatron_fspo.lab.sweep.summary import as_json, summarize, table

    sweep = read_sweep(args.file)
    words = {"words": (*sweep.words, *overrides)}
    sweep = sweep.model_copy(update=words if args.jobs is None else {**words, "jobs": args.jobs})
    make(sweep, lambda line: print(line, flush=True))
    found = summarize(sweep)
    path = sweep.folder / "summary.json"
    path.write_text(as_json(found), encoding="utf-8")
    print(f"\n{table(found, sweep.match)}\n\n{path}")
    return 0


def _count(word: str) -> int:
    count = int(word)
    if count < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return count
