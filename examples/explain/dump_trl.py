"""Dump a TRL run for ``megatron-fspo explain``: a line for each response and update.

    python examples/explain/dump_trl.py --out runs/trl          # in an environment with trl==1.16.0
    megatron-fspo explain runs/trl/dump.jsonl

TRL's table of completions has no log-probs, so a subclass writes them where the loss is computed. This is a
short run of GSPO (``importance_sampling_level="sequence"``) with the model of examples/make_sum on a CPU. In
your run, replace ``GRPOTrainer`` by :class:`DumpingTrainer`; with several processes, each needs its own file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

MAKE_SUM = Path(__file__).parents[1] / "make_sum"


class DumpingTrainer(GRPOTrainer):
    """Appends a line for each response of each update to ``dump.jsonl`` in the output folder."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._new = found[0].detach()
        return found

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        loss = super()._compute_loss(model, inputs)
        old = inputs.get("old_per_token_logps")
        columns = {
            "per_token_logps": self._new,
            "old_per_token_logps": self._new if old is None else old,  # TRL omits it on-policy
            "completion_mask": inputs["completion_mask"] * inputs.get("tool_mask", 1),
            "advantages": inputs["advantages"],
            "prompt": inputs["prompt_ids"],  # identified by its tokens
        }
        with (Path(self.args.output_dir) / "dump.jsonl").open("a", encoding="utf-8") as file:
            for values in zip(*(column.tolist() for column in columns.values()), strict=True):
                row = {"step": self.state.global_step + 1, **dict(zip(columns, values, strict=True))}
                file.write(json.dumps(row) + "\n")
        return loss


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Return 1 for responses whose every third digit sums to the answer, else 0."""
    right = [
        sum(map(int, filter(str.isdecimal, text[::3]))) == int(a)
        for text, a in zip(completions, answer, strict=True)
    ]
    return list(map(float, right))


def train(out: Path, steps: int) -> None:
    torch.set_num_threads(1)
    lines = (MAKE_SUM / "train.jsonl").read_text(encoding="utf-8").splitlines()
    config = GRPOConfig(
        output_dir=str(out),
        use_cpu=True,
        bf16=False,
        learning_rate=3e-4,
        max_steps=steps,
        per_device_train_batch_size=24,
        gradient_accumulation_steps=1,
        steps_per_generation=2,
        num_iterations=2,
        num_generations=8,
        max_completion_length=100,
        temperature=1.0,
        importance_sampling_level="sequence",
        loss_type="grpo",
        epsilon=0.003,
        epsilon_high=0.004,
        beta=0.0,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        seed=1,
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / "dump.jsonl").unlink(missing_ok=True)
    trainer = DumpingTrainer(
        model=AutoModelForCausalLM.from_pretrained(MAKE_SUM / "checkpoint", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(MAKE_SUM / "checkpoint"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
    )
    trainer.train()
    (out / "metrics.json").write_text(json.dumps(trainer.state.log_history, indent=1), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--steps", type=int, default=8, help="updates (default 8)")
    arguments = parser.parse_args()
    train(arguments.out, arguments.steps)
