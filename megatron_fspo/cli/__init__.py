"""``megatron-fspo train | plan | verify | calibrate | evaluate | data | serve | status | report | doctor``.

Exit status: 0 done; 1 the run or the check failed; 2 bad arguments or input, told in one line; 143 stopped
by SIGTERM with a checkpoint to resume from.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_fspo.cli.parser import make_parser
from megatron_fspo.console import exit_status, quiet_megatron


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    quiet_megatron()
    parser = make_parser()
    words = sys.argv[1:] if argv is None else list(argv)
    args, rest = parser.parse_known_args(words)
    args.argv = words
    of_a_run = args.command in ("train", "plan", "calibrate", "evaluate") or (
        args.command == "verify" and args.config
    )
    if rest and not of_a_run:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return exit_status(lambda: int(args.run(args, rest)), "megatron-fspo")
