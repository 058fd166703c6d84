"""FSPO in slime: through its published loss function, on real ranks of gloo.

``SLIME_SOURCE`` names a clone of https://github.com/THUDM/slime (seen at 624b824). Nothing of it is replaced;
the model is a table of logits by the token before.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from launch import torchrun
from megatron_fspo.errors import InputError
from megatron_fspo.lab.explain.dump import read_dump
from megatron_fspo.lab.explain.rows import NAMES, OTHER_MASKS
from megatron_fspo.losses import FSPOLoss

SOURCE = os.environ.get("SLIME_SOURCE")

pytestmark = [
    pytest.mark.skipif(SOURCE is None, reason="SLIME_SOURCE names no clone of slime"),
    pytest.mark.filterwarnings("ignore"),
]

LOSS = FSPOLoss(c_low=0.05, c_high=0.04)
WORDS = 17
LAYOUTS = {"alone": (1, 1, 3), "dp2": (2, 1, 2), "cp2": (2, 2, 1), "dp2.cp2": (4, 2, 3)}
"""Ranks, context parallel size, micro-batches."""


def random_batch(table: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Responses of 1 to 40 tokens behind prompts of 1 to 9, some of whose tokens a mask leaves out."""
    generator = torch.Generator().manual_seed(3)

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    found = []
    for i in range(24):
        length = 1 if i == 5 else between(2, 40)
        tokens = torch.randint(WORDS, (between(1, 9) + length,), generator=generator)
        new = table.log_softmax(dim=-1)[tokens[:-1], tokens[1:]][-length:]
        mask = (torch.rand(length, generator=generator) < 0.9).long()
        if i == 7:
            mask.zero_()
        advantage = torch.randn((), generator=generator)
        found.append(
            {
                "tokens": tokens,
                "old": new - 0.05 * torch.randn(length, generator=generator),
                "mask": mask,
                "advantages": advantage.expand(length).clone(),
            }
        )
    return found


def by_definition(
    batch: list[dict[str, torch.Tensor]], table: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float]]:
    """The gradient of −J in float64, and metrics; N counts a response whose tokens are all masked."""
    leaf = table.double().requires_grad_()
    total, outside, clipped = torch.zeros((), dtype=torch.float64), 0, 0
    for one in batch:
        kept = one["mask"] > 0
        if not kept.any():
            continue
        tokens = one["tokens"]
        log_probs = leaf.log_softmax(dim=-1)[tokens[:-1], tokens[1:]][-len(kept) :]
        ratio = (log_probs - one["old"].double())[kept]
        defined = LOSS.definition(ratio, float(one["advantages"][0]), log_probs[kept])
        total = total + defined.objective.mean()
        outside += defined.out_of_band
        clipped += bool(torch.as_tensor(defined.clipped).any())
    loss = -total / len(batch)
    loss.backward()
    assert leaf.grad is not None
    shares = {"fspo/out_of_band": outside / len(batch), "clipped": clipped / len(batch)}
    return leaf.grad, {"loss": loss.item(), **shares}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_gradient_of_the_definition(tmp_path: Path, layout: str) -> None:
    ranks, context, micro_batches = LAYOUTS[layout]
    table = torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(1))
    batch = random_batch(table)
    torch.save(batch, tmp_path / "batch.pt")
    torch.save(table, tmp_path / "table.pt")
    worker = Path(__file__).with_name("slime_worker.py")
    program = [str(word) for word in (worker, tmp_path, context, micro_batches)]
    path = os.pathsep.join([str(SOURCE), str(Path(__file__).parents[2])])
    done = torchrun(program, nproc=ranks, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr[-3000:]

    gradient, want = by_definition(batch, table)
    assert want["fspo/out_of_band"] > 0.2
    for rank in range(ranks):
        saved = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        scale = gradient.abs().max().item()
        torch.testing.assert_close(saved["gradient"].double(), gradient, rtol=1e-5, atol=5e-6 * scale)
        got = saved["metrics"]
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
        assert got["fspo/out_of_band"] == pytest.approx(want["fspo/out_of_band"])
        removed = got["fspo/clip_low"] + got["fspo/clip_high"] + got["fspo/dual_clip_frac"]
        assert (
            removed == pytest.approx(want["clipped"]) and min(got["fspo/clip_low"], got["fspo/clip_high"]) > 0
        )


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, ModuleType]]:
    monkeypatch.syspath_prepend(str(SOURCE))
    yield importlib.import_module("megatron_fspo.adapters.slime"), importlib.import_module("slime_worker")
    for name in [name for name in sys.modules if name.split(".")[0] == "slime"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"eps_clip_high": 0.2}, "slime's default for a ratio: set both of them"),
        ({"eps_clip": -1.0}, "c_low"),
        ({"eps_clip_c": 0.01}, "c_dual must be at least c_high"),
        ({"calculate_per_token_loss": True}, "--calculate-per-token-loss is not supported with FSPO"),
        ({"use_kl_loss": True}, "--use-kl-loss is not supported with FSPO"),
        ({"entropy_coef": 0.01}, "--entropy-coef is not supported with FSPO"),
        ({"use_tis": True}, "--use-tis is not supported with FSPO"),
        ({"get_mismatch_metrics": True}, "--get-mismatch-metrics is not supported with FSPO"),
        ({"use_opsm": True}, "--use-opsm is not supported with FSPO"),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    adapter: tuple[ModuleType, ModuleType], changed: dict[str, Any], told: str
) -> None:
    fspo, worker = adapter
    with pytest.raises(ValueError, match=told):
        fspo.fspo_loss(worker.flags(**changed), {}, torch.zeros(1, 1, WORDS), None)


def test_a_row_of_its_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """slime saves old and sampled log-probs; with the new ones beside them `explain` reads a sample. Every
    name in the dump is read or said to be not read, and every mask in slime's sources is known."""
    text = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("ray", "observability", "backends/megatron_utils")
        for path in (Path(str(SOURCE)) / "slime" / folder).glob("*.py")
    )
    masks = set(re.findall(r'"(\w*masks?)"', text)) - {"full_loss_masks"}  # the packed batch's
    assert "loss_masks" in masks and masks <= {*NAMES["mask"], *OTHER_MASKS}, masks
    monkeypatch.syspath_prepend(str(SOURCE))
    data = importlib.import_module("slime.observability.train_data_utils")
    sample = {
        "tokens": [[1, 2, 3, 4]],
        "response_lengths": [3],
        "loss_masks": [[1, 0, 1]],
        "rewards": [1.0],
        "log_probs": [torch.tensor([-1.0, -9.0, -2.0])],
        "rollout_log_probs": [torch.tensor([-1.5, -1.0, -2.0])],
        "advantages": [torch.full((3,), 1.0)],
        "sample_indices": [0],
        "planted": [1],
    }
    shard = {"rank": 0, "data_parallel_rank": 0, "rollout_data": sample}
    (row,) = data._build_dump_payload([shard], rollout_id=3, writer_rank=0)["samples"]
    row = {name: value.tolist() if torch.is_tensor(value) else value for name, value in row.items()}
    file = tmp_path / "dump.jsonl"
    file.write_text(json.dumps(row))
    with pytest.raises(InputError, match="old_log_prob"):  # one policy only
        read_dump(file, {})
    row |= {"old_log_probs": row["log_probs"], "log_probs": [-0.5, 9.0, -2.0]}
    file.write_text(json.dumps(row))
    dump = read_dump(file, {})
    assert (dump.lengths.tolist(), dump.log_ratio_sum.tolist()) == ([2], [0.5])
    unread = {"tokens", "response_lengths", "rewards", "data_parallel_rank", "sample_index", "planted"}
    assert set(dump.unread) == unread
