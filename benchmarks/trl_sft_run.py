"""The side of :mod:`sft_against_trl` that TRL's SFTTrainer runs, in TRL's own environment.

Reads a job as JSON from the file that is its argument, and writes response tokens and seconds of every step
beside it.
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
    from torch.utils.data import SequentialSampler
    from trl import SFTConfig, SFTTrainer

    job = json.loads(path.read_text())
    tokens: list[int] = []
    starts: list[float] = []

    class Trainer(SFTTrainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

        def training_step(self, model: Any, inputs: Any, *args: Any, **keys: Any) -> Any:
            starts.append(time.perf_counter())
            tokens.append(int((inputs["labels"] >= 0).sum()))
            return super().training_step(model, inputs, *args, **keys)

    config = SFTConfig(
        output_dir=str(path.parent / "trl"),
        use_cpu=True,
        bf16=False,
        learning_rate=1e-12,
        max_steps=job["steps"],
        per_device_train_batch_size=job["batch"],
        gradient_checkpointing=False,
        max_length=None,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
    )
    rows = [json.loads(line) for line in Path(job["rows"]).read_text().splitlines()]
    Trainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        args=config,
        train_dataset=Dataset.from_list(rows),
    ).train()
    ends = [*starts[1:], time.perf_counter()]
    found = {"tokens": tokens, "step": [end - start for start, end in zip(starts, ends, strict=True)]}
    path.with_suffix(f".{os.environ['RANK']}.json").write_text(json.dumps(found))
    dist.barrier()  # whoever leaves first aborts the other now and then
    dist.destroy_process_group()


if __name__ == "__main__":
    train(job_file(__doc__))
