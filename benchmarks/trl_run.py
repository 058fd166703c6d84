"""The side of :mod:`against_trl` that TRL's GRPOTrainer runs, in TRL's own environment.

Reads a job as JSON from the file that is its argument, and writes the seconds and response tokens of every
generation batch beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback


class Clock(TrainerCallback):
    """Seconds of a generation batch and its updates."""

    def __init__(self, updates: int) -> None:
        self.updates = updates
        self.seconds: list[float] = []
        self._since = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.updates == 0:
            self._since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.updates == 0:
            self.seconds.append(time.perf_counter() - self._since)


def train(path: Path) -> None:
    """Train for the job's steps."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    job = json.loads(path.read_text())
    torch.set_num_threads(job["threads"])
    world = int(os.environ.get("WORLD_SIZE", "1"))
    tokens: list[int] = []

    def reward(completions: list[Any], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list:
        tokens.append(sum(map(len, completion_ids)))
        texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
        numbers = [re.findall(r"-?\d+", text) for text in texts]
        return [float(bool(n) and n[-1] == right) for n, right in zip(numbers, answer, strict=True)]

    responses, mini_batches = job["prompts"] * job["samples"], job["mini_batches"]
    updates = mini_batches * job["epochs"]
    config = GRPOConfig(
        output_dir=str(path.parent / "trl"),
        use_cpu=True,
        bf16=False,
        learning_rate=job["lr"],
        max_steps=job["steps"] * updates,
        per_device_train_batch_size=responses // mini_batches // world,
        gradient_accumulation_steps=1,
        steps_per_generation=mini_batches,
        num_iterations=job["epochs"],
        num_generations=job["samples"],
        max_completion_length=job["max_response_tokens"],
        temperature=1.0,
        importance_sampling_level="sequence",
        loss_type="grpo",
        beta=0.0,
        gradient_checkpointing=False,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        seed=job["seed"],
    )
    clock = Clock(updates)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(job["rows"]),
        callbacks=[clock],
    )
    trainer.train()
    rank = int(os.environ.get("RANK", "0"))
    found = {"seconds": clock.seconds, "tokens": tokens}
    path.with_suffix(f".{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", type=Path, help="written by against_trl.py")
    train(parser.parse_args().job)
