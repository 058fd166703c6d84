"""How often the host waits for the device: see the worker for what counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launch import found_by
from megatron_fspo.mcore.model.policy_loss import Scoring
from megatron_fspo.verify.cases import LOSSES
from packs import collate, sample


def test_the_host_waits_once_per_micro_batch(random_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """In backward, for the rows with a gradient; everything else is fetched once per pass."""
    worker = Path(__file__).with_name("sync_worker.py")
    found = found_by(worker, tmp_path, str(random_checkpoints["tied"]), nproc=1)
    (few, passes), (many, more) = sorted((int(count), calls) for count, calls in found.items())
    assert many > few > 0
    assert passes["score"] == more["score"] == {}
    for count, calls in ((few, passes), (many, more)):
        for loss in LOSSES:
            wanted = {"parallel/head.py nonzero": count, "parallel/groups.py tolist": 1}
            assert calls.pop(f"update {loss}") == wanted, loss
    assert passes == more, "more micro-batches, more syncs"


@pytest.mark.parametrize("label", [-1, 5])
def test_labels_are_checked_by_numbers_of_the_host(label: int) -> None:
    batch = collate([sample([1], [2, label])], [0], num_sequences=1, num_tokens=2)
    groups: Any = None
    scoring = Scoring(groups=groups, vocab_size=5, temperature=1.0)
    with pytest.raises(ValueError, match=f"labels from {min(label, 2)} to {max(label, 2)}, .* 5$"):
        scoring(batch, torch.empty(1, 3, 2), torch.nn.Identity())
