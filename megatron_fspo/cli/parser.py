"""The words of the command line, and their help."""

from __future__ import annotations

import argparse

from megatron_fspo import __version__
from megatron_fspo.cli import evaluate, lab, tools, train
from megatron_fspo.cli.console import OneLineParser


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; ``run`` of its result does what was asked for."""
    parser = OneLineParser(prog="megatron-fspo", description="FSPO on Megatron-Core.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    train.add_train(commands)
    lab.add_plan(commands)
    tools.add_verify(commands)
    lab.add_calibrate(commands)
    evaluate.add_evaluate(commands)
    lab.add_explain(commands)
    lab.add_sweep(commands)
    tools.add_data(commands)
    tools.add_serve(commands)
    tools.add_status(commands)
    lab.add_report(commands)
    tools.add_doctor(commands)
    return parser
