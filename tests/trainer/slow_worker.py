"""A training run on two ranks whose rank 1 computes slowly, looked at from outside in its third step.

slow_worker.py STATUS.txt ARGUMENTS...
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_fspo.cli import main
from megatron_fspo.job import lock
from megatron_fspo.mcore.policy_loss import PolicyLoss
from megatron_fspo.record.status import examine, render
from megatron_fspo.trainer import optimize


def run() -> int:
    out, arguments = Path(sys.argv[1]), sys.argv[2:]
    folder = Path(arguments[arguments.index("--run.folder") + 1]) / "slow"
    forward, update = PolicyLoss.forward_step, optimize._update

    def slow(*args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        result = forward(*args, **kwargs)
        if os.environ["RANK"] == "1":
            busy = time.thread_time() - began
            while time.thread_time() - began < 5 * busy:  # as much as forward and backward need, and more
                pass
        return result

    def watched(run: Any, step: Any) -> Any:
        if os.environ["RANK"] == "0" and run.step == 2 and len(step.updates) == 1:
            time.sleep(5 * lock.REFRESH_SECONDS)  # until both ranks have written this step
            out.write_text(render(examine(folder)), encoding="utf-8")
        return update(run, step)

    with (
        mock.patch.object(lock, "REFRESH_SECONDS", 0.2),
        mock.patch.object(PolicyLoss, "forward_step", slow),
        mock.patch.object(optimize, "_update", watched),
    ):
        return main(arguments)


if __name__ == "__main__":
    sys.exit(run())
