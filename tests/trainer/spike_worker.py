"""A training run on two ranks; in some optimizer steps the loss of rank 1 is a million times too large.

spike_worker.py FOUND.json 9,10 ARGUMENTS...: the numbers of these optimizer steps, from 1. Each rank looks
whether a skipped one left weights and optimizer as they were, to the bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_fspo.cli import main
from megatron_fspo.mcore.parameter_state import parameter_states
from megatron_fspo.mcore.policy import Policy
from megatron_fspo.mcore.policy_loss import PolicyLoss
from megatron_fspo.trainer import optimize


def state_of(policy: Policy) -> str:
    """A hash of the weights, and of all that the optimizer knows."""
    found = hashlib.sha256(json.dumps([policy.optimizer_steps]).encode())
    for state in parameter_states(policy):
        for tensor in (state.parameter, state.main, *state.moments.values()):
            found.update(tensor.detach().numpy().tobytes())
    found.update(json.dumps([group["lr"] for group in policy.optimizer.param_groups]).encode())
    return found.hexdigest()


def run() -> int:
    out, wanted, arguments = Path(sys.argv[1]), {*map(int, sys.argv[2].split(","))}, sys.argv[3:]
    update, loss, rank = optimize._update, PolicyLoss.loss, os.environ["RANK"]
    found: list[dict[str, float]] = []

    def watched(run: Any, step: Any) -> Any:
        before = state_of(run.policy)
        found.append({})
        done, records = update(run, step)
        moved = state_of(run.policy) != before
        found[-1] = {"skipped": done.skipped, "moved": moved, "norm": done.grad_norm}
        return done, records

    def spiked(self: PolicyLoss, *args: Any) -> Any:
        value, *rest = loss(self, *args)
        spike = rank == "1" and len(found) in wanted
        return ((1e6 if spike else 1.0) * value, *rest)

    with mock.patch.object(optimize, "_update", watched), mock.patch.object(PolicyLoss, "loss", spiked):
        try:
            return main(arguments)
        finally:
            out.with_suffix(f".{rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(run())
