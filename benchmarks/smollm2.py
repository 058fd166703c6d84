"""The noise of FP8 in a really pretrained model, on a CPU: SmolLM2-135M-Instruct, 128 responses.

    make runs/smollm2/checkpoint/config.json
    python benchmarks/smollm2.py
    PYTHONPATH=benchmarks megatron-fspo calibrate --config benchmarks/smollm2.toml --nproc 2 \
        --emulate blockwise mxfp8 tensorwise

examples/smollm2 has the model; this writes the questions.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron_fspo.types import Completion, Prompt

OUT = Path("runs/smollm2")
SUMS = [(3, 4), (8, 5), (17, 25), (40, 2), (9, 9), (12, 30), (6, 7), (21, 21)]
QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What is the capital of Japan? Say something about the city.": "Tokyo",
    "Why is the sky blue?": "scatter",
    "Explain photosynthesis.": "light",
    "How do I bake bread? Give all steps.": "flour",
    "List the planets of the solar system with one sentence each.": "Saturn",
    "What is a prime number? Give examples.": "7",
    "How does a car engine work?": "fuel",
    "Write Python code that sorts a list.": "sort",
    "Who was Isaac Newton?": "gravity",
    "Write a short story about a fox.": "forest",
    "Write a poem about the sea.": "wave",
    "Name three colours.": "red",
    "Translate 'good morning' to Spanish.": "Buenos",
    "What does a heart do?": "blood",
    "Describe how rain forms.": "water",
    "What is a democracy?": "vote",
    "Give three reasons to learn a language.": "culture",
    "How do vaccines work?": "immune",
    "What is the difference between a frog and a toad?": "skin",
    "Summarise the story of Romeo and Juliet.": "Verona",
    "What is inflation in economics?": "price",
    "Explain how a bicycle stays upright.": "balance",
    "What should I pack for a hike?": "water",
}


def answer_in_response(prompt: Prompt, completion: Completion, response: str) -> float:
    """1 where the answer is mentioned: crude, but groups have variance."""
    return float(prompt.answer in response)


def main() -> None:
    """Write the prompts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    rows = {f"What is {a} + {b}? Answer with the number.": str(a + b) for a, b in SUMS} | QUESTIONS
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in rows.items()]
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
