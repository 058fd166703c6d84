"""FSPO in TRL on make-sum: the reward rises within a few minutes on one CPU core.

    python examples/in_trl/train.py --steps 128 --out runs/in-trl

Only one line is not plain TRL: the import of FSPOConfig and FSPOTrainer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

from megatron_fspo.adapters.trl import FSPOConfig, FSPOTrainer
from megatron_fspo.rewards.make_sum import digits_sum_to

TASK = Path(__file__).parents[1] / "make_sum"
EOS = 12


def reward(
    completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any
) -> list[float]:
    """Return 1 if the policy stopped by itself and its digits sum to the answer, else 0."""
    rows = zip(completions, completion_ids, answer, strict=True)
    return [float(EOS in ids and digits_sum_to(text, right)) for text, ids, right in rows]


def train(folder: Path, steps: int, seed: int) -> list[dict[str, float]]:
    """Train and return TRL's log of each optimizer step. A rollout of 64 prompts × 8 samples has 8 steps."""
    tokenizer = AutoTokenizer.from_pretrained(TASK / "checkpoint")
    rows = [json.loads(line) for line in (TASK / "train.jsonl").read_text().splitlines()]
    config = FSPOConfig(
        output_dir=str(folder),
        c_low=0.08,
        c_high=0.08,
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        max_steps=steps,
        per_device_train_batch_size=128,
        gradient_accumulation_steps=1,
        steps_per_generation=4,
        num_iterations=2,
        num_generations=8,
        max_completion_length=100,
        scale_rewards="none",
        gradient_checkpointing=False,
        logging_steps=1,
        disable_tqdm=True,
        save_strategy="no",
        report_to=[],
        seed=seed,
        use_cpu=True,
        bf16=False,
    )
    trainer = FSPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(TASK / "checkpoint"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [row for row in trainer.state.log_history if "fspo/clip_low" in row]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=128, help="optimizer steps, 8 per rollout")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/in-trl"))
    args = parser.parse_args()
    for row in train(args.out, args.steps, args.seed):
        if "reward" in row:  # only the first step of a rollout has it, which is on-policy
            print(f"step {row['step']:4}  reward {row['reward']:.3f}  ", end="")
        elif row["step"] % 8 == 0:
            print(f"out of band {row['fspo/out_of_band']:.3f}  sigma {row['fspo/sigma_hat']:.3f}")
