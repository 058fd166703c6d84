"""torchrun with our rendezvous, without its own messages: a rank reports its failure in one line."""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from megatron_fspo.cli.console import exit_status
from megatron_fspo.job.hang import NOTE, dumped


def main() -> int:
    """Run torchrun with this program's arguments. Return the exit status of the rank that failed first, 1 if
    a signal killed it; 130 after Ctrl-C, 143 after SIGTERM."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    from megatron_fspo.cli.rendezvous import BACKEND, meet

    rendezvous_handler_registry.register(BACKEND, meet)
    for module in ("agent.server.api", "multiprocessing.api"):  # signals, and failures that ranks reported
        logging.getLogger(f"torch.distributed.elastic.{module}").setLevel(logging.CRITICAL)
    threading.Thread(target=_wake_stopped_ranks, daemon=True).start()
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK):  # for connections, and InfiniBand
        resource.setrlimit(kind, (resource.getrlimit(kind)[1],) * 2)
    began = time.time()
    handle, name = tempfile.mkstemp()
    os.close(handle)
    os.environ[NOTE], note = name, Path(name)
    try:
        run.main(["--rdzv-backend", BACKEND, *sys.argv[1:]])
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        if line := dumped(note, began):
            print(f"megatron-fspo: {line}", file=sys.stderr, flush=True)
        if first.exitcode >= 0:
            return first.exitcode
        killed = f"rank {rank} (process {first.pid}) was killed by {first.signal_name()}"
        print(f"megatron-fspo: {killed}", file=sys.stderr, flush=True)
        return 1
    finally:
        note.unlink(missing_ok=True)
    return 0


def _wake_stopped_ranks() -> None:
    """Send SIGCONT to ranks stopped by SIGSTOP that have a pending SIGTERM, so that they handle it."""
    while True:
        time.sleep(1.0)
        for rank in psutil.Process().children():
            with suppress(OSError, psutil.NoSuchProcess):  # the rank may have ended
                status = Path(f"/proc/{rank.pid}/status").read_text()
                pending = re.search(r"^State:\s*T.*^ShdPnd:\s*([0-9a-f]+)", status, re.DOTALL | re.MULTILINE)
                if pending and int(pending[1], 16) >> (signal.SIGTERM - 1) & 1:
                    rank.send_signal(signal.SIGCONT)


if __name__ == "__main__":
    sys.exit(exit_status(main, "megatron-fspo"))
