"""The ledger: running values over a short and a long family of responses, with no symbol in common.

    python benchmarks/ledger/ledger.py --out runs/ledger     # some minutes on one core

A prompt is a count and a value, ``A9 a4``. A response counts down to 0, and at every count permutes the
value as a table of the family says for that count: ``A8 a1 A7 a6 … A0 a3``. Reward 1 for the last value and
the right number of steps, so one slip anywhere loses all: a long response needs a small error at every step.

The model, a Qwen3 of two layers, learns each family from demonstrations until so large a part of its
responses would be right. RL begins there.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_fspo.types import Completion, Prompt

FAMILIES = "AB"
"""The short and the long one."""
VALUES, TABLES = 10, 12
BEGIN, STOP, PAD = "^", "$", "_"
HELD_OUT = 5
"""One in so many prompts is for evaluation."""
GROWTH, GROWING = 10, 640
"""Times that responses grow, over so many prompts."""
LEARNING_RATE, WARM_UP, MOST_STEPS, TRIED = 3e-3, 50, 6000, 10


def table(family: str) -> list[list[int]]:
    """[TABLES][VALUES], the permutation of each count, by its remainder."""
    rng = random.Random(family)
    return [rng.sample(range(VALUES), VALUES) for _ in range(TABLES)]


def chain(family: str, count: int, value: int) -> list[str]:
    """The right response of ``2·count`` tokens, without its stop token."""
    words, permutations = [], table(family)
    for left in reversed(range(count)):
        value = permutations[left % TABLES][value]
        words += [f"{family}{left}", f"{family.lower()}{value}"]
    return words


def last_value(prompt: Prompt, completion: Completion, response: str) -> float:
    """The reward: 1 for the right last value after the right number of steps."""
    words = response.split()
    return float(" ".join([str(len(words)), *words[-2:]]) == prompt.answer)


def vocabulary(longest: Sequence[int]) -> list[str]:
    """All tokens, for the largest count of each family."""
    words = [BEGIN, STOP, PAD]
    for family, most in zip(FAMILIES, longest, strict=True):
        words += [f"{family.lower()}{value}" for value in range(VALUES)]
        words += [f"{family}{count}" for count in range(most + 1)]
    return words


def demonstrations(
    family: str, counts: Sequence[int], ids: dict[str, int], size: int, rng: random.Random
) -> tuple[Tensor, Tensor]:
    """Ids [size, tokens] of random prompts with their right responses, and labels, -100 but for responses."""
    rows = []
    for _ in range(size):
        count, value = rng.randint(*counts), rng.randrange(VALUES)
        rows.append(
            [BEGIN, f"{family}{count}", f"{family.lower()}{value}", *chain(family, count, value), STOP]
        )
    width = max(map(len, rows))
    tokens = torch.tensor([[ids[word] for word in row + [PAD] * (width - len(row))] for row in rows])
    labels = tokens.masked_fill(tokens == ids[PAD], -100)
    labels[:, :3] = -100
    return tokens, labels


def log_likelihood(model: Qwen3ForCausalLM, tokens: Tensor, labels: Tensor) -> Tensor:
    """[N] log-probability of the labels of each row."""
    logits = model(tokens[:, :-1]).logits
    return -torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), labels[:, 1:], reduction="none", ignore_index=-100
    ).sum(1)


def main() -> None:
    """Make checkpoint and prompts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--short", type=int, nargs=2, default=[5, 15], help="counts of the short family")
    parser.add_argument("--long", type=int, nargs=2, default=[75, 195], help="counts of the long family")
    parser.add_argument("--until", type=float, default=0.4, help="part of the responses that is right then")
    parser.add_argument("--hidden", type=int, default=96)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rng, counts = random.Random(0), dict(zip(FAMILIES, (args.short, args.long), strict=True))
    words = vocabulary([most for _, most in counts.values()])
    ids = {word: number for number, word in enumerate(words)}
    model = make_model(ids, args.hidden, longest=2 * args.long[1] + 8)
    learn(model, counts, ids, args.until, rng)
    save(model, word_tokenizer(ids), args.out / "checkpoint")
    write_prompts(args.out, counts)


def make_model(ids: dict[str, int], hidden: int, *, longest: int) -> Qwen3ForCausalLM:
    """A Qwen3 of two layers with random weights, for sequences of at most ``longest`` tokens."""
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=hidden // 4,
        vocab_size=len(ids),
        max_position_embeddings=longest,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=ids[BEGIN],
        eos_token_id=ids[STOP],
        pad_token_id=ids[PAD],
    )
    return Qwen3ForCausalLM(config)


def word_tokenizer(ids: dict[str, int]) -> Tokenizer:
    """A tokenizer of words between blanks."""
    tokenizer = Tokenizer(models.WordLevel(vocab=ids, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def learn(
    model: Qwen3ForCausalLM,
    counts: dict[str, list[int]],
    ids: dict[str, int],
    until: float,
    rng: random.Random,
) -> None:
    """Demonstrations of each family while fewer of its responses than ``until`` would be right."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    held = {family: demonstrations(family, of, ids, 100, random.Random(1)) for family, of in counts.items()}
    right, began = dict.fromkeys(counts, 0.0), time.monotonic()
    for step in range(MOST_STEPS):
        if step % TRIED == 0:
            # Each prompt has one right response, whose probability is the accuracy.
            with torch.no_grad():
                chances = {family: log_likelihood(model, *some).exp() for family, some in held.items()}
            right = {family: chance.mean().item() for family, chance in chances.items()}
            print(step, right, f"{time.monotonic() - began:.0f} s", flush=True)
            if all(part >= until for part in right.values()):
                return
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1, (step + 1) / WARM_UP)
        loss = torch.zeros(())
        for family, size in zip(FAMILIES, (16, 16), strict=True):
            if right[family] < until:
                tokens, labels = demonstrations(family, counts[family], ids, size, rng)
                loss = loss - log_likelihood(model, tokens, labels).sum() / (labels >= 0).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    raise SystemExit(f"after {MOST_STEPS} steps only {right}")


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a checkpoint with its tokenizer, as transformers has them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.add_special_tokens([BEGIN, STOP, PAD])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": BEGIN, "eos_token": STOP, "pad_token": PAD, "unk_token": PAD}
    of_tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    of_model = {**model.config.to_dict(), "architectures": ["Qwen3ForCausalLM"], "dtype": "float32"}
    (folder / "tokenizer_config.json").write_text(json.dumps(of_tokenizer | special))
    (folder / "config.json").write_text(json.dumps(of_model, default=str))
    weights = {name: weight.detach().contiguous() for name, weight in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_prompts(folder: Path, counts: dict[str, list[int]]) -> None:
    """``short.jsonl``, ``long.jsonl``, and with ``_held_out`` one in ``HELD_OUT`` of all prompts; and
    ``growing.jsonl``, of the long family from a tenth of its largest count to that."""
    for (family, (least, most)), name in zip(counts.items(), ("short", "long"), strict=True):
        sets: dict[bool, list[str]] = {True: [], False: []}
        for count in range(least, most + 1):
            for value in range(VALUES):
                sets[(count + 3 * value) % HELD_OUT == 0].append(prompt(family, count, value))
        for held, file in ((False, name), (True, f"{name}_held_out")):
            (folder / f"{file}.jsonl").write_text("".join(sets[held]), encoding="utf-8")
    most = counts[FAMILIES[1]][1]
    grown = (most // GROWTH + number * (most - most // GROWTH) // GROWING for number in range(GROWING))
    rows = []
    for number, count in enumerate(grown):
        value = number % VALUES
        value = (value + ((count + 3 * value) % HELD_OUT == 0)) % VALUES
        rows.append(prompt(FAMILIES[1], count, value))
    (folder / "growing.jsonl").write_text("".join(rows), encoding="utf-8")


def prompt(family: str, count: int, value: int) -> str:
    """A row of a file."""
    right = chain(family, count, value)
    text = f"{BEGIN} {family}{count} {family.lower()}{value}"
    return json.dumps({"prompt": text, "answer": " ".join([str(len(right)), *right[-2:]])}) + "\n"


if __name__ == "__main__":
    main()
