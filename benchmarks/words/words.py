"""Lists of words in reverse order: reasoning_gym's ``word_sequence_reversal``, for a model of our own.

    python benchmarks/words/words.py --out runs/words     # some minutes on one core

A prompt is a list of 2 to 12 words, ``^the, house, of=``; the response is the same list from its end, letter
by letter, in 6 to 106 tokens. The reward is the package's own scorer: 1 for it, 0 with any letter wrong.

The model, a Qwen3 of two layers, learns from other lists until so large a part of its responses would be
right. RL begins there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_fspo.rewards.gym import gym_rows

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "ledger"))
from ledger import BEGIN, LEARNING_RATE, PAD, STOP, WARM_UP, log_likelihood, save

TASK, ASKS = "word_sequence_reversal", "="
WORDS = (2, 12)
FILES = {"train": (960, 1, WORDS), "short_held_out": (96, 2, (2, 4)), "long_held_out": (96, 3, (10, 12))}
"""Name → prompts, seed, words of a list."""
MOST_STEPS, TRIED, BATCH = 6000, 25, 32


def rows(size: int, seed: int, words: tuple[int, int]) -> list[dict[str, Any]]:
    """Rows of a data file; the question is shortened to its list."""
    found = list(gym_rows(TASK, size, seed, min_words=words[0], max_words=words[1]))
    for row in found:
        row["prompt"] = f"{BEGIN}{', '.join(reversed(row['answer'].split(', ')))}{ASKS}"
    return found


def batch(some: Sequence[dict[str, Any]], ids: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Ids [rows, tokens] of prompts with their right responses, and labels, -100 but for responses."""
    texts = [row["prompt"] + row["answer"] + STOP for row in some]
    width = max(map(len, texts))
    tokens = torch.tensor([[ids[char] for char in text.ljust(width, PAD)] for text in texts])
    labels = tokens.masked_fill(tokens == ids[PAD], -100)
    for label, row in zip(labels, some, strict=True):
        label[: len(row["prompt"])] = -100
    return tokens, labels


def learn(model: Qwen3ForCausalLM, ids: dict[str, int], until: float) -> None:
    """Demonstrations while the mean probability of the right response to other lists is less."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    held, fresh = batch(rows(256, 4, WORDS), ids), rows(MOST_STEPS * BATCH, 1_000_000, WORDS)
    began = time.monotonic()
    for step in range(MOST_STEPS):
        if step % TRIED == 0:
            with torch.no_grad():
                right = log_likelihood(model, *held).exp().mean().item()
            print(step, f"{right:.3f}, {time.monotonic() - began:.0f} s", flush=True)
            if right >= until:
                return
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1, (step + 1) / WARM_UP)
        tokens, labels = batch(fresh[step * BATCH :][:BATCH], ids)
        optimizer.zero_grad()
        (-log_likelihood(model, tokens, labels).sum() / (labels >= 0).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    raise SystemExit(f"after {MOST_STEPS} steps only {right:.2f}")


def main() -> None:
    """Make checkpoint and prompts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--until", type=float, default=0.4, help="part of the responses that is right then")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sets = {name: rows(*of) for name, of in FILES.items()}
    letters = sorted({char for row in rows(20_000, 1_000_000, WORDS) for char in row["answer"]})
    alphabet = [BEGIN, STOP, PAD, ASKS, *letters]
    ids = {char: number for number, char in enumerate(alphabet)}
    config = Qwen3Config(
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        vocab_size=len(alphabet),
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=ids[BEGIN],
        eos_token_id=ids[STOP],
        pad_token_id=ids[PAD],
    )
    model = Qwen3ForCausalLM(config)
    learn(model, ids, args.until)
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    save(model, tokenizer, args.out / "checkpoint")
    for name, of in sets.items():
        (args.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of))


if __name__ == "__main__":
    main()
