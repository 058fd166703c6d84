"""A training run that is asked to stop at a given moment.

stop_worker.py MOMENT COUNT ARGUMENTS...: SIGTERM to the first rank alone, when it comes to the COUNTth graded
response (``rollout``), optimizer step (``update``) or ``evaluation``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any
from unittest import mock

from megatron_fspo.cli import main
from megatron_fspo.trainer import loop, optimize, sampling

PLACES: dict[str, tuple[Any, str]] = {
    "rollout": (sampling, "response_text"),
    "update": (optimize, "_update"),
    "evaluation": (loop, "evaluate"),
}


def run() -> int:
    moment, count, arguments = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    place, name = PLACES[moment]
    real = getattr(place, name)
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(3)  # until it has reached the other ranks
        return real(*args, **kwargs)

    with mock.patch.object(place, name, counted):
        return main(["train", *arguments])


if __name__ == "__main__":
    sys.exit(run())
