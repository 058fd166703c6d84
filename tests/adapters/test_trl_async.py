"""FSPO through the packed loss of TRL's asynchronous trainer; its attention kernel for GPUs is replaced."""

from __future__ import annotations

import math
import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoTokenizer
from trl.experimental.async_grpo import async_grpo_trainer, packing
from trl_batches import CHECKPOINT, LONGEST, PROMPT, difference, random_batch, random_model, score

from megatron_fspo.adapters.trl_async import AsyncFSPOConfig, AsyncFSPOTrainer

# TRL and transformers announce what is experimental, and what they are going to remove.
pytestmark = pytest.mark.filterwarnings("ignore")


def varlen(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *_: Any, **keys: Any) -> Tensor:
    """Causal attention of each segment over its path, which ends where the segment does; [t, heads, d]."""
    rows = []
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    for i in range(len(cu_q) - 1):
        own, path = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        n, m = own.stop - own.start, path.stop - path.start
        scores = torch.einsum("qhd,khd->hqk", q[own], k[path]) * keys["softmax_scale"]
        later = torch.arange(m) > torch.arange(n)[:, None] + m - n
        rows.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -math.inf).softmax(-1), v[path]))
    return torch.cat(rows)


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncFSPOTrainer:
    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=varlen))
    # It asks a server for its state, and the GPU for its peak performance.
    monkeypatch.setattr(async_grpo_trainer, "VLLMClient", MagicMock())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "none")
    random_model().save_pretrained(tmp_path / "model")
    nothing = SimpleNamespace(rollout_buffer=queue.Queue(), metrics_queue=queue.Queue())
    made = AsyncFSPOTrainer(
        model=str(tmp_path / "model"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=AsyncFSPOConfig(
            str(tmp_path / "out"),
            use_cpu=True,
            bf16=False,
            dtype="float32",
            gradient_checkpointing=False,
            per_device_train_batch_size=7,
            max_completion_length=LONGEST,
            report_to=[],
            max_steps=1,
        ),
        processing_class=AutoTokenizer.from_pretrained(CHECKPOINT),
        train_dataset=Dataset.from_list([{"prompt": "^17="}] * 7),
        rollout_worker=nothing,
        weight_transfer=nothing,
    )
    made.current_gradient_accumulation_steps = 1
    return made


def packed(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The responses of a batch, without the empty one, as TRL's collator packs them into one row."""
    row = packing.TreeRow()
    for i, kept in enumerate(batch["completion_mask"].bool()):
        if kept.any():
            ids = torch.cat([batch["prompt_ids"][i], batch["completion_ids"][i][kept]])
            old = torch.cat([torch.zeros(PROMPT), batch["old_per_token_logps"][i][kept]])
            row.add(
                {
                    "input_ids": ids,
                    "completion_mask": (torch.arange(len(ids)) >= PROMPT).long(),
                    "old_log_probs": old,
                    "advantage": batch["advantages"][i].item(),
                    "group_id": 0,
                    "metrics": {},
                }
            )
    return async_grpo_trainer.DataCollatorForRollout(pad_token_id=13)([[row]])


def test_the_packed_loss_is_the_librarys(trainer: AsyncFSPOTrainer) -> None:
    batch = random_batch()
    trainer.training_step(trainer.model, packed(batch), None)
    found = {name: p.grad for name, p in trainer.model.named_parameters()}

    model = random_model()
    model.zero_grad()
    mask = batch["completion_mask"].bool()
    s = torch.where(mask, score(model, batch) - batch["old_per_token_logps"], 0.0).sum(dim=1)
    terms = trainer.args.fspo().surrogate(s, mask.sum(dim=1), batch["advantages"])
    assert 0 < terms.clipped.sum() < 6
    (-(terms.weight * s).sum() / 7).backward()
    assert difference(found, {name: p.grad for name, p in model.named_parameters()}) < 2e-5
    model.zero_grad()
    recorded = trainer._metrics["train"]
    assert recorded["fspo/clip_low"] == [pytest.approx(terms.clipped_low.sum().item() / 7)]
    assert recorded["entropy"] and not any(name.startswith("clip_ratio/") for name in recorded)


def test_a_row_without_a_trained_token_and_advantages_that_differ(trainer: AsyncFSPOTrainer) -> None:
    row = packed(random_batch())
    advantages = row["advantages"].clone()
    chosen = (row["token_index"] >= 0).nonzero()
    advantages[tuple(chosen[0])] += 1.0
    with pytest.raises(ValueError, match="one advantage"):
        trainer.compute_loss(trainer.model, row | {"advantages": advantages})
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, row | {"token_index": torch.full_like(row["token_index"], -1)})
    loss.backward()
    assert loss.item() == 0 and all(p.grad is None or not p.grad.any() for p in trainer.model.parameters())


@pytest.mark.parametrize("keys", [{"epsilon": 0.1}, {"epsilon_high": 0.3}, {"token_budget": None}])
def test_what_does_not_fit_is_refused_in_one_line(keys: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(keys))) as error:
        AsyncFSPOConfig(str(tmp_path), use_cpu=True, bf16=False, **keys)
    assert "\n" not in str(error.value)
