"""The ledger with filler: six decisions in a response of any length, the other tokens certain or uncertain.

    python benchmarks/ledger/filler.py --words 1 --out runs/filler-certain      # a minute or two on one core
    python benchmarks/ledger/filler.py --words 4 --out runs/filler-uncertain

A prompt is a number of fillers and a value, ``n3 a=4``. A response has six steps; each counts down with as
many fillers and then permutes the value as a table of the step says: ``b3.0 b2.0 b1.0 b=9 c3.0 c2.0 …``.
After the dot is one of ``--words``, all equally frequent in demonstrations: with one word, fillers are
certain; with more, any will do. Reward is the share of the six permutations that are right.
Demonstrations take the right value in half of the cases, and any in the others: so when RL begins, decisions
are equally uncertain at all lengths.

In ``growing.jsonl`` each rollout has all values with one number of fillers, which grows over the run.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from itertools import product, starmap
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from ledger import (
    BEGIN,
    LEARNING_RATE,
    MOST_STEPS,
    PAD,
    STOP,
    TRIED,
    WARM_UP,
    make_model,
    save,
    word_tokenizer,
)
from megatron_fspo.types import Completion, Prompt

STEPS, VALUES, MOST = 6, 16, 16
"""Decisions of a response, values, and the largest number of fillers before each decision."""
ROLLOUTS, FIRST, LATER = 20, 6, 5
"""Steps of a run, of which so many at the beginning have the least fillers, and at the end the most."""
LETTERS = "abcdefg"
"""The prompt's value has the first, and of each step value and fillers the next."""
HELD_OUT = {"short_held_out": 2, "long_held_out": 15}
"""Validation file → its number of fillers, which training leaves out."""
BATCH, CERTAIN, FALLING, LEAST = 24, 0.45, 1500, 0.05
"""Demonstrations a step, the chance of a right decision, the steps over which the learning rate falls, to
this part."""


def tables() -> list[list[int]]:
    """[STEPS][VALUES], the permutation of each step."""
    rng = random.Random("filler")
    return [rng.sample(range(VALUES), VALUES) for _ in range(STEPS)]


def value_token(step: int, value: int) -> str:
    """The value after so many steps; 0: that of the prompt."""
    return f"{LETTERS[step]}={value}"


def filler(step: int, left: int, word: int) -> str:
    """One of the words before a decision, where so many fillers are left."""
    return f"{LETTERS[step]}{left}.{word}"


def response(fillers: int, value: int, words: int, rng: random.Random, certain: float = 1.0) -> list[str]:
    """A response of ``6·(fillers + 1)`` tokens, without its stop token. ``certain``: chance that a decision
    is the right one; else it is any."""
    tokens = []
    for step, permutation in enumerate(tables(), 1):
        tokens += [filler(step, left, rng.randrange(words)) for left in range(fillers, 0, -1)]
        value = permutation[value] if rng.random() < certain else rng.randrange(VALUES)
        tokens.append(value_token(step, value))
    return tokens


def right_share(prompt: Prompt, completion: Completion, text: str) -> float:
    """The reward: the share of decisions that are right given the value before; 0 for a wrong length."""
    fillers, before = map(int, prompt.answer.split())
    words, right = text.split(), 0
    if len(words) != STEPS * (fillers + 1):
        return 0.0
    for step, permutation in enumerate(tables(), 1):
        written = words[step * (fillers + 1) - 1]
        right += written == value_token(step, permutation[before])
        if not written.startswith(f"{LETTERS[step]}="):
            return 0.0
        before = int(written[2:])
    return right / STEPS


def vocabulary(words: int) -> list[str]:
    """All tokens."""
    places = product(range(1, STEPS + 1), range(1, MOST + 1), range(words))
    counts = [f"n{count}" for count in range(1, MOST + 1)]
    values = [value_token(step, value) for step in range(STEPS + 1) for value in range(VALUES)]
    return [BEGIN, STOP, PAD, *counts, *values, *starmap(filler, places)]


def demonstrations(
    fillers: int, ids: dict[str, int], words: int, size: int, rng: random.Random, certain: float
) -> Tensor:
    """Ids [size, tokens] of prompts with their responses."""
    rows = []
    for _ in range(size):
        value = rng.randrange(VALUES)
        prompt = [BEGIN, f"n{fillers}", value_token(0, value)]
        rows.append([*prompt, *response(fillers, value, words, rng, certain), STOP])
    return torch.tensor([[ids[word] for word in row] for row in rows])


def by_kind(values: Tensor, words: int, mean: bool = False) -> Tensor:
    """[..., kinds] of values [..., tokens]: of the words of a filler, the last tokens, the sum or mean."""
    count = STEPS * MOST * words
    fillers = values[..., -count:].unflatten(-1, (-1, words))
    return torch.cat([values[..., :-count], fillers.mean(-1) if mean else fillers.sum(-1)], -1)


@torch.no_grad()
def accuracy(model: Qwen3ForCausalLM, tokens: Tensor, kinds: Tensor, words: int) -> float:
    """Of right responses, the mean chance of a decision times that of all else: any word of a filler."""
    chances = by_kind(model(tokens[:, :-1]).logits.softmax(-1)[:, 2:], words)
    right = chances.gather(2, kinds[tokens[:, 3:]][..., None])[..., 0]
    decisions = torch.arange(1, STEPS + 1) * ((tokens.shape[1] - 4) // STEPS) - 1
    rest = right.log().sum(1) - right[:, decisions].log().sum(1)
    return float((right[:, decisions].mean(1) * rest.exp()).mean())


def learn(model: Qwen3ForCausalLM, ids: dict[str, int], words: int, until: float) -> None:
    """Demonstrations until such a part of the longest responses is right."""
    rng, began = random.Random(0), time.monotonic()
    kinds = torch.arange(len(ids))
    fillers = kinds >= len(ids) - STEPS * MOST * words
    first = int(kinds[fillers][0])
    kinds[fillers] = first + (kinds[fillers] - first) // words
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    held = {
        count: demonstrations(count, ids, words, 64, random.Random(1), 1.0) for count in (1, 5, 9, 13, MOST)
    }
    for step in range(MOST_STEPS):
        if step % TRIED == 0:
            right = {count: round(accuracy(model, some, kinds, words), 3) for count, some in held.items()}
            print(step, right, f"{time.monotonic() - began:.0f} s", flush=True)
            if min(right.values()) >= until:
                return
        fall = max(LEAST, 1 - step / FALLING)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1, (step + 1) / WARM_UP, fall)
        count = rng.choice([rng.randint(1, MOST), rng.randint(1, MOST), 1, MOST])
        tokens = demonstrations(count, ids, words, BATCH, rng, CERTAIN)
        # Of a filler the mean over its words rather than the one that was drawn.
        own = by_kind(model(tokens[:, :-1]).logits.log_softmax(-1)[:, 2:], words, mean=True)
        loss = -own.gather(2, kinds[tokens[:, 3:]][..., None]).sum() / BATCH / 10
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    raise SystemExit(f"after {MOST_STEPS} steps only {right}")


def fillers_at(rollout: int) -> int:
    """Fillers before each decision in a rollout, from 0: from 1 to ``MOST``, evenly in log length."""
    grown = min(max(rollout - FIRST + 1, 0) / (ROLLOUTS - FIRST - LATER + 1), 1.0)
    fillers = round(2 * ((MOST + 1) / 2) ** grown) - 1
    return fillers + (fillers in HELD_OUT.values())


def row(fillers: int, value: int) -> str:
    """A row of a file."""
    text = f"{BEGIN} n{fillers} {value_token(0, value)}"
    return json.dumps({"prompt": text, "answer": f"{fillers} {value}"}) + "\n"


def write_prompts(folder: Path) -> None:
    """``growing.jsonl``, in the order of training, and the files of ``HELD_OUT``."""
    grown = [row(fillers_at(rollout), value) for rollout in range(ROLLOUTS) for value in range(VALUES)]
    (folder / "growing.jsonl").write_text("".join(grown), encoding="utf-8")
    for name, fillers in HELD_OUT.items():
        rows = [row(fillers, value) for value in range(VALUES)]
        (folder / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")


def main() -> None:
    """Make checkpoint and prompts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--words", type=int, required=True, help="at each filler; 1: fillers are certain")
    parser.add_argument("--until", type=float, default=0.46, help="part of the decisions that is right then")
    parser.add_argument("--hidden", type=int, default=64)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ids = {word: number for number, word in enumerate(vocabulary(args.words))}
    model = make_model(ids, args.hidden, longest=STEPS * (MOST + 1) + 8)
    learn(model, ids, args.words, args.until)
    save(model, word_tokenizer(ids), args.out / "checkpoint")
    write_prompts(args.out)


if __name__ == "__main__":
    main()
