"""An id for ranks that were started together, used as a prefix of their keys in the job's store.

torchrun restarts ranks after a failure but keeps the store, with failures, counters and addresses of the
previous ranks. Its restart count is not a valid id: agents whose own ranks did not fail do not increase it.
So the first rank draws an id and answers the random token that each rank posts at its start. Starts never
overlap, because torchrun ends all ranks before it starts new ones.
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
"""Seconds after which the first rank prints which ranks are missing."""
_POLL_SECONDS = 0.02


def agree_on_start_id(store: Store, rank: int, size: int, *, seconds: float) -> str:
    """Wait for all ranks and return the id of this start: the same on all ranks, and never used before.
    Raises ``TrainingError`` if not all arrive within ``seconds``; the first rank names the missing ones."""
    return _give(store, size, seconds) if rank == 0 else _take(store, rank, seconds)


def _give(store: Store, size: int, seconds: float) -> str:
    """On the first rank, answer each new token with a new id until all ranks confirm that they have it."""
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
                raise TrainingError(f"waited {seconds:g} s for the ranks to start; missing: {missing}")
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
    raise TrainingError(f"waited {seconds:g} s for the ranks to start; missing: rank 0")


def _came(start_id: str, rank: int) -> str:
    return f"{PREFIX}/came/{start_id}/{rank}"
