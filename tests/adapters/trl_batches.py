"""A tiny random model, a batch with responses in and out of the band, and trainers of TRL around them."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

CHECKPOINT = Path(__file__).resolve().parents[2] / "examples/make_sum/checkpoint"
VOCABULARY = 14
PROMPT, LONGEST = 3, 24


@cache
def random_model() -> Qwen3ForCausalLM:
    """Two layers in float32; each trainer gets a copy."""
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.3,
        pad_token_id=13,
        eos_token_id=12,
        bos_token_id=10,
    )
    return Qwen3ForCausalLM(config).float().eval()


def score(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """log π(y_t) [n, T] by log-softmax of all logits, in the model's precision; nothing of TRL."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    logits = model(input_ids=ids, attention_mask=attention).logits[:, PROMPT - 1 : -1]
    return logits.log_softmax(dim=-1).gather(2, batch["completion_ids"][..., None])[..., 0]


def random_batch(n: int = 8, seed: int = 0, spread: float = 0.05) -> dict[str, Tensor]:
    """What TRL has generated and scored: n responses, the last one left out (an empty mask).

    ``old_per_token_logps`` is the model's own, moved by noise of ``spread`` per token.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LONGEST + 1, (n,), generator=generator)
    lengths[0], lengths[-1] = LONGEST, 0
    mask = (torch.arange(LONGEST) < lengths[:, None]).long()
    ids = torch.randint(0, 10, (n, LONGEST), generator=generator)
    batch = {
        "prompt_ids": torch.randint(0, 10, (n, PROMPT), generator=generator),
        "prompt_mask": torch.ones(n, PROMPT, dtype=torch.long),
        "completion_ids": torch.where(mask > 0, ids, 13),
        "completion_mask": mask,
        "advantages": torch.randn(n, generator=generator),
        "num_items_in_batch": mask.sum(),
    }
    batch["advantages"][1] = 0.0
    noise = spread * torch.randn(mask.shape, generator=generator)
    with torch.no_grad():
        # Whatever stands outside the mask must not count.
        batch["old_per_token_logps"] = torch.where(mask > 0, score(random_model(), batch) + noise, 7.0)
    return batch


def make_trainer(
    trainer: Any, config: Any, folder: Path, micro_batches: int = 1, n: int = 8, **keys: Any
) -> Any:
    """A trainer of TRL for n responses a step, in so many micro-batches."""
    arguments = {"num_generations": 2, "num_iterations": 2, **keys}
    made = trainer(
        model=copy.deepcopy(random_model()),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config(
            str(folder),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=n // micro_batches,
            gradient_accumulation_steps=micro_batches,
            max_completion_length=LONGEST,
            report_to=[],
            **arguments,
        ),
        processing_class=AutoTokenizer.from_pretrained(CHECKPOINT),
        train_dataset=Dataset.from_list([{"prompt": "^17="}] * n),
    )
    made.current_gradient_accumulation_steps = micro_batches  # what train() does
    made.create_optimizer()
    return made


def one_step(trainer: Any, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], float]:
    """Gradient by name, and the loss, after all micro-batches of one optimizer step, on TRL's own path.

    Only generation is replaced: splitting, scoring, loss and backward are those of a run.
    """
    trainer._generate_and_score_completions = lambda _: dict(batch)
    trainer.model.zero_grad()
    losses = [
        trainer.training_step(trainer.model, None, None).item()
        for _ in range(trainer.args.gradient_accumulation_steps)
    ]
    gradient = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
    return gradient, sum(losses)


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of any entry, as a share of the largest entry."""
    largest = max(value.abs().max().item() for value in expected.values())
    return max((found[name] - value).abs().max().item() for name, value in expected.items()) / largest
