"""torchrun, as ``--nproc`` starts it: after Ctrl-C the first rank has the only line."""

from __future__ import annotations

import logging
import signal
import sys

from megatron_fspo.console import exit_status


def main() -> int:
    """Run torchrun with the arguments of this program."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException

    for module in ("agent.server.api", "multiprocessing.api"):  # they warn of every signal that they pass on
        logging.getLogger(f"torch.distributed.elastic.{module}").setLevel(logging.ERROR)
    try:
        run.main(sys.argv[1:])
    except SignalException as stopped:
        if stopped.sigval != signal.SIGINT:
            raise
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main, "megatron-fspo"))
