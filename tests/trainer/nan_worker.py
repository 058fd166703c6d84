"""A training run in which some sequences become NaN.

nan_worker.py FOLDER NAME PLACE COUNT: in the second optimizer step of step 2, COUNT sequences of the first
micro-batch; PLACE is ``head``, the hidden states on their way into the loss, or ``layer``, the first layer's.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from megatron_fspo.cli import main
from megatron_fspo.mcore.policy_loss import PolicyLoss
from megatron_fspo.trainer import optimize
from nonfinite_worker import Fault
from runs import CONFIG, SMALL

WHEN = 6
"""Which optimizer step, of all: there are four of one micro-batch each in step 1."""


def at_the_head(count: int) -> AbstractContextManager[Any]:
    """As a broken kernel leaves it: no parameter's gradient depends on it."""
    original = PolicyLoss.loss
    calls = 0

    def loss(self, batch, model, hidden):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if calls == WHEN:
            # Under sequence parallel this rank holds a slice of the tokens.
            share = batch.segment.chunk(self.scoring.groups.tp.size())[self.scoring.groups.tp.rank()]
            hidden = hidden.clone()
            hidden[0, share < count] = float("nan")
        return original(self, batch, model, hidden)

    return mock.patch.object(PolicyLoss, "loss", loss)


def in_a_layer(count: int) -> AbstractContextManager[Any]:
    """In every pass of this optimizer step, those that look for it as well."""
    original = optimize._update
    calls = 0

    def update(run: Any, step: Any) -> Any:
        nonlocal calls
        calls += 1
        with Fault(step.packs_of(step.turn)[0].sample_index.tolist()[:count] if calls == WHEN else [])():
            return original(run, step)

    return mock.patch.object(optimize, "_update", update)


def poison() -> object:
    """Run it."""
    folder, name, place, count = *sys.argv[1:4], int(sys.argv[4])
    arguments = ["train", "--config", str(CONFIG), "--run.folder", folder, "--run.name", name, *SMALL]
    with {"head": at_the_head, "layer": in_a_layer}[place](count):
        return main([*arguments, "--run.steps", "3", "--loss.max-nonfinite-share", "0.2"])


if __name__ == "__main__":
    sys.exit(poison())
