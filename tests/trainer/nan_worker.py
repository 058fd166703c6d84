"""A training run in which the logits of some sequences become NaN.

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
    """Wrap the loss: NaN in the logits of the first sequences, as a broken kernel would leave them."""
    folder, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    original = PolicyLoss.loss
    calls = 0

    def loss(self, batch, logits):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        if calls == 6:  # four optimizer steps of one micro-batch each in step 1
            rows = batch.segment < count
            logits = logits.clone()
            logits[0, rows] = float("nan")
        return original(self, batch, logits)

    arguments = ["train", "--config", str(CONFIG), "--run.folder", folder, "--run.name", name, *SMALL]
    with mock.patch.object(policy_loss.PolicyLoss, "loss", loss):
        return main([*arguments, "--run.steps", "3", "--loss.max-nonfinite-share", "0.2"])


if __name__ == "__main__":
    sys.exit(poison())
