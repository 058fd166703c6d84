"""An id for the ranks that were started together, under which they keep their keys in the job's store.

torchrun starts ranks anew after a failure, and keeps the store in which those before them have left failures,
counters and addresses. The number of the restart is no id: an agent whose own ranks had not failed does not
count it. So the first rank draws one, and gives it to every rank whose token it sees; a token is drawn at
a rank's start, so what an earlier rank left is not answered for long. No two starts overlap: torchrun has
ended all ranks of one before it begins the next.
"""

from __future__ import annotations

import secrets
import sys
import time

from torch.distributed.distributed_c10d import Store

from megatron_fspo.errors import TrainingError
from megatron_fspo.job.control import read_keys, shortened

PREFIX = "megatron_fspo/start"
SAY_AFTER = 60.0
"""Seconds, after which the first rank says who is missing."""
_POLL_SECONDS = 0.02


def agree_on_start_id(store: Store, rank: int, size: int, *, seconds: float) -> str:
    """Return the id of this start, the same on all of its ranks and never used before, when all are there.

    Raises:
        TrainingError: ranks did not come within these seconds; the first rank names them.
    """
    return _give(store, size, seconds) if rank == 0 else _take(store, rank, seconds)


def _give(store: Store, size: int, seconds: float) -> str:
    """Answer every new token, until all ranks say that they have the id."""
    start_id, began, said = secrets.token_hex(8), time.monotonic(), False
    others = range(1, size)
    tokens = {rank: f"{PREFIX}/token/{rank}" for rank in others}
    answered: set[bytes] = set()
    while not store.check([_came(start_id, rank) for rank in others]):
        for token in set(read_keys(store, tokens).values()) - answered:
            store.set(f"{PREFIX}/name/{token.decode()}", start_id)
            answered.add(token)
        waited = time.monotonic() - began
        if waited > min(seconds, SAY_AFTER) and not (said and waited < seconds):
            missing = shortened(
                [f"rank {rank}" for rank in others if not store.check([_came(start_id, rank)])]
            )
            if waited > seconds:
                raise TrainingError(f"waited {seconds:g} s for the ranks to start; not there: {missing}")
            said = True
            print(f"megatron-fspo: rank 0 waits for the start of {missing}", file=sys.stderr, flush=True)
        time.sleep(_POLL_SECONDS)
    return start_id


def _take(store: Store, rank: int, seconds: float) -> str:
    token, end = secrets.token_hex(8), time.monotonic() + seconds
    store.set(f"{PREFIX}/token/{rank}", token)
    while time.monotonic() < end:
        if store.check([f"{PREFIX}/name/{token}"]):
            start_id = store.get(f"{PREFIX}/name/{token}").decode()
            store.set(_came(start_id, rank), "1")
            return start_id
        time.sleep(_POLL_SECONDS)
    raise TrainingError(f"waited {seconds:g} s for the ranks to start; not there: rank 0")


def _came(start_id: str, rank: int) -> str:
    return f"{PREFIX}/came/{start_id}/{rank}"
