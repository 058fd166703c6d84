"""The arguments of ``explain``, and what it does. It imports no Megatron and asks for no GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

_HELP = """\
Say what each loss makes of the same responses: what it clips, how evenly over length, what noise would.

A dump of any trainer:    megatron-fspo explain dump.jsonl
Your limits:              megatron-fspo explain dump.parquet --fspo.c-high 0.04 --gspo.eps-low 2e-4
One step of our run:      megatron-fspo explain runs/demo --step 10 --fspo.c-low 0.05 --fspo.c-high 0.05
At a rate of 10%:         ... --rate 0.1 --out runs/explained
Other names of fields:    ... --fields log_ratio_sum=summed_kl advantage=adv

A row has the response length L, S or the token log-probs of both policies, and the advantage A. Limits
are those of the losses' sections in docs/config.md. docs/explain.md says more, also of TRL and verl.
"""


def add_explain(commands: argparse._SubParsersAction) -> None:
    """Give the command line this command."""
    explain = commands.add_parser(
        "explain",
        help="which loss clips which responses of a dump",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    explain.add_argument("file", type=Path, help="jsonl or parquet of any trainer, or the folder of our run")
    explain.add_argument("--step", type=int, metavar="N", help="only rows of this step (default: all)")
    explain.add_argument(
        "--rate",
        type=float,
        metavar="X",
        help="share outside at which losses are compared (default: that of FSPO with its limits)",
    )
    explain.add_argument(
        "--fields", nargs="+", default=[], metavar="FIELD=NAME", help="names of fields in the file"
    )
    explain.add_argument(
        "--out", type=Path, metavar="DIR", help="write a page, the figures, and the fate of every response"
    )
    explain.add_argument("--json", action="store_true", help="print one JSON line")
    explain.set_defaults(run=run)


def run(args: argparse.Namespace, limits: list[str]) -> int:
    """0."""
    from megatron_fspo.lab.explain.command import explain, text, write

    found = explain(args.file, limits, args.fields, step=args.step, rate=args.rate)
    written = write(found, args.out) if args.out is not None else ""
    print(text(found, use_json=args.json))
    if written and not args.json:
        print(written)
    return 0
