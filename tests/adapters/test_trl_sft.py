"""TRL's SFTTrainer on the rows that we read: the same tokens, loss and gradient."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from launch import REPO
from megatron_fspo.config.data import Data
from megatron_fspo.data.prompts import load_set
from megatron_fspo.data.tasks import make_source
from megatron_fspo.data.tokenizer import load_tokenizer
from megatron_fspo.losses.sft import SFTLoss
from megatron_fspo.objective.surrogate import LossInputs

sys.path.insert(0, str(REPO / "examples/make_sum"))
from make_sum import NUMBERS, demonstration, prompt_text

CHECKPOINT = REPO / "examples/make_sum/checkpoint"

# TRL and transformers announce what they are going to remove.
pytestmark = pytest.mark.filterwarnings("ignore")


def gradients(model: Any) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_tokens_loss_and_gradient_are_those_of_sft_trainer(tmp_path: Path) -> None:
    rng = random.Random(5)
    numbers = rng.sample(NUMBERS, 6)
    rows = [{"prompt": prompt_text(n), "completion": demonstration(n, rng)} for n in numbers]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer: Any = load_tokenizer(CHECKPOINT)
    data = Data(train=tmp_path / "rows.jsonl", preset="completion")
    source = make_source(data, data.train_sets[0])
    stops = [tokenizer.eos_token_id]
    ours = load_set(source, tokenizer, max_prompt_tokens=9, stops=stops, max_response_tokens=100).prompts

    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT).double()
    options = SFTConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=6, use_cpu=True, bf16=False, report_to="none"
    )
    dataset = Dataset.from_list(rows)
    trainer = SFTTrainer(model=model, args=options, train_dataset=dataset, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    theirs = trainer.compute_loss(model, dict(batch))
    theirs.backward()
    wanted = gradients(model)
    counted = [
        ids[labels >= 0].tolist() for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]
    responses = [list(one.demonstration.token_ids) for one in ours if one.demonstration is not None]
    assert sorted(counted) == sorted(responses)

    model.zero_grad()
    log_probs, lengths = [], [len(response) for response in responses]
    for prompt, response in zip(ours, responses, strict=True):
        ids = torch.tensor([*prompt.token_ids, *response])
        logits = model(ids[None]).logits[0, len(prompt.token_ids) - 1 : -1]
        log_probs.append(logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0])
    flat = torch.cat(log_probs)
    segment = torch.arange(6).repeat_interleave(torch.tensor(lengths))
    terms = SFTLoss()(
        LossInputs(
            log_probs=flat.detach(),
            log_ratio=torch.zeros_like(flat),
            loss_mask=torch.ones_like(flat, dtype=torch.bool),
            segment=segment,
            sequence_sums=lambda x: torch.zeros(len(x), 6, dtype=x.dtype).index_add_(1, segment, x),
            prefix_sums=lambda x: x,
            lengths=torch.tensor(lengths),
            advantages=torch.ones(6),
            num_sequences=6,
            num_tokens=sum(lengths),
        )
    )
    loss = -(terms.weight * flat).sum() / 6
    loss.backward()
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-6)  # theirs is computed in float32
    assert torch.allclose(gradients(model), wanted, rtol=1e-4, atol=1e-7)
