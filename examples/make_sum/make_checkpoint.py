"""Make this folder's files: train.jsonl, validation.jsonl and checkpoint/, a warm start for RL.

A Qwen3 of 0.2M parameters is trained on demonstrations (SFT, by sft.toml) until about two in three responses
are right: enough to get rewards often, with room to improve.

    python examples/make_sum/make_checkpoint.py                # the files in the repository
    python examples/make_sum/make_checkpoint.py --steps 100 --seed 7 --out /tmp/weaker
    python examples/make_sum/make_checkpoint.py --head-dim 32 --out runs/make-sum-32    # for vLLM on a CPU
    python examples/make_sum/make_checkpoint.py --calls 0.02 --steps 400 --out runs/make-sum-tools

The output is reproducible on one machine. Other CPUs or torch versions may round differently.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from make_sum import (
    ALPHABET,
    BEGIN,
    EQUALS,
    HELD_OUT,
    MAX_RESPONSE_TOKENS,
    NUMBERS,
    PAD,
    STOP,
    TRAIN,
    demonstration,
    prompt_text,
    write_prompts,
)
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_fspo.rewards.make_sum import digits_sum_to

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": ALPHABET.index(BEGIN),
    "dtype": "float32",
    "eos_token_id": ALPHABET.index(STOP),
    "head_dim": 24,
    "hidden_act": "silu",
    "hidden_size": 96,
    "initializer_range": 0.05,
    "intermediate_size": 256,
    "max_position_embeddings": 256,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": ALPHABET.index(PAD),
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": len(ALPHABET),
}
GENERATION_CONFIG = {
    **{key: CONFIG[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    "do_sample": True,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": BEGIN,
    "eos_token": STOP,
    "pad_token": PAD,
    "clean_up_tokenization_spaces": False,
    "model_max_length": CONFIG["max_position_embeddings"],
}
BATCH = 64
"""Demonstrations of an optimizer step, as sft.toml has it."""


def encode(text: str) -> list[int]:
    return [ALPHABET.index(character) for character in text]


def write_demonstrations(path: Path, steps: int, seed: int, calls: float | None) -> None:
    """Write random demonstrations, one per row and ``BATCH`` per step. Digits that a tool writes are messages
    of the tool, so they are not learned."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for step in range(1, steps + 1):
            # The model first learns to use the tool, then to use it rarely.
            share = None if calls is None else max(calls, 0.9 * (1 - step / (0.8 * steps)))
            for number in rng.choices(NUMBERS, k=BATCH):
                first, *others = demonstration(number, rng, share).split(EQUALS)
                completion = [{"role": "assistant", "content": first + EQUALS * bool(others)}]
                for text in others:
                    completion.append({"role": "tool", "content": text[:2]})
                    rest = text[2:] + EQUALS * (text is not others[-1])
                    completion.append({"role": "assistant", "content": rest})
                file.write(json.dumps({"prompt": prompt_text(number), "completion": completion}) + "\n")


def train(model: Any, config: Mapping[str, object], *, steps: int, seed: int, calls: float | None) -> Any:
    """Return ``model`` after SFT on random demonstrations."""
    with TemporaryDirectory() as folder:
        begin, data = Path(folder, "begin"), Path(folder, "demonstrations.jsonl")
        save(model, config, begin)
        write_demonstrations(data, steps, seed, calls)
        words = f"train --config {Path(__file__).with_name('sft.toml')} --model.checkpoint {begin}"
        words += f" --data.train {data} --run.folder {folder} --run.steps {steps} --run.seed {seed}"
        # Its process group ends with its process.
        subprocess.run([sys.executable, "-m", "megatron_fspo", *words.split()], check=True)
        return type(model).from_pretrained(Path(folder, "sft", "hf")).float()


@torch.no_grad()
def sample(model: Qwen3ForCausalLM, numbers: Sequence[int], seed: int) -> list[str]:
    """Sample one response per number at temperature 1, with the stop token if it is within 100 tokens."""
    prompts = torch.tensor([encode(prompt_text(number)) for number in numbers])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        ids = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=MAX_RESPONSE_TOKENS,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
    responses = []
    for row in ids[:, prompts.shape[1] :].tolist():
        text, stop, _ = "".join(ALPHABET[token] for token in row).partition(STOP)
        responses.append(text + stop)
    return responses


def accuracy(numbers: Sequence[int], responses: Sequence[str]) -> float:
    verdicts = [
        response.endswith(STOP) and digits_sum_to(response.removesuffix(STOP), str(number))
        for number, response in zip(numbers, responses, strict=True)
    ]
    return sum(verdicts) / len(verdicts)


def save(model: Any, config: Mapping[str, object], folder: Path) -> None:
    """Write ``model``, ``config`` and tokenizer as a Hugging Face checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(ALPHABET)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([BEGIN, STOP, PAD])
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (
        ("config", config),
        ("generation_config", GENERATION_CONFIG),
        ("tokenizer_config", TOKENIZER_CONFIG),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder (default: this one)")
    parser.add_argument(
        "--head-dim", type=int, default=CONFIG["head_dim"], help="width of a head (default: %(default)s)"
    )
    parser.add_argument(
        "--calls", type=float, help="teach tool calls instead of notes; final share of responses with calls"
    )
    options = parser.parse_args(arguments)
    if options.calls is not None and not 0 <= options.calls <= 1:
        parser.error("--calls: must be a share from 0 to 1")

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    config = {**CONFIG, "head_dim": options.head_dim}
    model = Qwen3ForCausalLM(Qwen3Config(**config))
    model = train(model, config, steps=options.steps, seed=options.seed, calls=options.calls)
    save(model, config, options.out / "checkpoint")
    write_prompts(options.out)
    for name, numbers in (("train", TRAIN), ("held out", HELD_OUT)):
        asked = numbers * (640 // len(numbers))
        responses = sample(model, asked, options.seed)
        lengths = [len(response) for response in responses]
        print(
            f"{name}: accuracy {accuracy(asked, responses):.3f} of {len(asked)}, length mean "
            f"{statistics.mean(lengths):.1f} min {min(lengths)} max {max(lengths)}"
        )


if __name__ == "__main__":
    main()
