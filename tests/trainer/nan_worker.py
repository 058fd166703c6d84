"""A training run in which the hidden states of some sequences become NaN.

nan_worker.py FOLDER NAME COUNT: in the second optimizer step of step 2, COUNT sequences of the micro-batch.
"""

from __future__ import annotations

import sys
from unittest import mock

from megatron_fspo.cli import main
from megatron_fspo.mcore import policy_loss
from megatron_fspo.mcore.policy_loss import PolicyLoss
from runs import CONFIG, SMALL


def poison() -> object:
    """Wrap the loss: NaN in the last hidden states of the first sequences, as a broken kernel leaves them."""
    folder, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    original = PolicyLoss.loss
    calls = 0

    def loss(self, batch, model, hidden):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if calls == 6:  # four optimizer steps of one micro-batch each in step 1
            # Under sequence parallel this rank holds a slice of the tokens.
            share = batch.segment.chunk(self.scoring.groups.tp.size())[self.scoring.groups.tp.rank()]
            hidden = hidden.clone()
            hidden[0, share < count] = float("nan")
        return original(self, batch, model, hidden)

    arguments = ["train", "--config", str(CONFIG), "--run.folder", folder, "--run.name", name, *SMALL]
    with mock.patch.object(policy_loss.PolicyLoss, "loss", loss):
        return main([*arguments, "--run.steps", "3", "--loss.max-nonfinite-share", "0.2"])


if __name__ == "__main__":
    sys.exit(poison())
