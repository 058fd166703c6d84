"""Make this folder's files: train.jsonl, validation.jsonl and checkpoint/, a warm start for RL.

A Qwen3 of 0.2M parameters is trained on demonstrations (cross-entropy on response tokens) until about two in
three responses are right: enough to get rewards often, with room to improve.

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
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

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
from torch import Tensor
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
BATCH, LEARNING_RATE, WARM_UP = 64, 3e-3, 30


def encode(text: str) -> list[int]:
    return [ALPHABET.index(character) for character in text]


def batch(rng: random.Random, size: int, calls: float | None) -> tuple[Tensor, Tensor]:
    """Return ids and labels of random demonstrations, each [size, tokens], right-padded. Labels are -100 for
    the prompt, for padding, and for the two digits that a tool writes."""
    numbers = rng.choices(NUMBERS, k=size)
    prompts = [encode(prompt_text(number)) for number in numbers]
    responses = [encode(demonstration(number, rng, calls)) for number in numbers]
    width = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    ids = torch.full((size, width), ALPHABET.index(PAD))
    labels = torch.full((size, width), -100)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        end = len(prompt) + len(response)
        ids[row, :end] = torch.tensor(prompt + response)
        labels[row, len(prompt) : end] = torch.tensor(response)
        for call in (place for place in range(len(prompt), end) if ids[row, place] == ALPHABET.index(EQUALS)):
            labels[row, call + 1 : call + 3] = -100
    return ids, labels


def train(model: Qwen3ForCausalLM, steps: int, seed: int, calls: float | None) -> None:
    """Train ``model`` on random demonstrations; the learning rate decays linearly to a tenth."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.1)
    started = time.monotonic()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, step / WARM_UP) * (1 - 0.9 * (step - 1) / steps)
        # The model first learns to use the tool, then to use it rarely.
        share = None if calls is None else max(calls, 0.9 * (1 - step / (0.8 * steps)))
        ids, labels = batch(rng, BATCH, share)
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps:
            seconds = time.monotonic() - started
            print(f"step {step}/{steps}  loss {loss.item():.4f}  {seconds:.0f} s", flush=True)


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


def save(model: Qwen3ForCausalLM, config: Mapping[str, object], folder: Path) -> None:
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
    train(model, options.steps, options.seed, options.calls)
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
