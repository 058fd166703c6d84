"""The side of :mod:`against_trl` that TRL's GRPOTrainer runs, in TRL's own environment.

Reads a job as JSON from the file that is its argument, and writes response tokens and seconds of every step
beside it: of the whole step, and of all that follows sampling.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from plain_run import job_file


def train(path: Path) -> None:
    """Train for the job's steps."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    job = json.loads(path.read_text())
    tokens: list[int] = []
    starts: list[float] = []
    sampled: list[float] = []

    class Trainer(GRPOTrainer):
        def _generate(self, *args: Any, **keys: Any) -> Any:
            starts.append(time.perf_counter())
            found = super()._generate(*args, **keys)
            sampled.append(time.perf_counter())
            return found

    def variety(completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return [float(len(set(ids))) for ids in completion_ids]

    steps, mini_batches = len(job["lengths"]), len(job["lengths"][0])
    config = GRPOConfig(
        output_dir=str(path.parent / "trl"),
        use_cpu=True,
        bf16=False,
        learning_rate=job["lr"],
        max_steps=steps * mini_batches * job["epochs"],
        per_device_train_batch_size=job["batch"] // int(os.environ["WORLD_SIZE"]),
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
    )
    Trainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        reward_funcs=variety,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in job["texts"]]),
    ).train()
    ends = [*starts[1:], time.perf_counter()]
    found = {
        "tokens": tokens,
        "step": [end - start for start, end in zip(starts, ends, strict=True)],
        "update": [end - start for start, end in zip(sampled, ends, strict=True)],
    }
    path.with_suffix(f".{os.environ['RANK']}.json").write_text(json.dumps(found))
    dist.barrier()  # whoever leaves first aborts the other now and then
    dist.destroy_process_group()


if __name__ == "__main__":
    train(job_file(__doc__))
