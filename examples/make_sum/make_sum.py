"""The make-sum task: write a number as a sum of digits, one digit at a time.

The prompt ``^17=`` asks for 17. A response subtracts one digit (1–9) at a time, writes the remainder in two
digits, and ends with ``$``: ``908 503 300 $`` without the spaces, since 9 + 5 + 3 = 17. Any other sum of
digits to 17 is also right. The reward is ``megatron_fspo.rewards.make_sum``.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

ALPHABET = "0123456789^=$_"
"""Token ``i`` is the character ``i``: digits, begin, equals, stop, padding."""
BEGIN, EQUALS, STOP, PAD = ALPHABET[10:]
MAX_RESPONSE_TOKENS = 100
"""33 digits with their remainders, and the stop token."""
NUMBERS = range(3, 80)
HELD_OUT = tuple(number for number in NUMBERS if number % 9 == 4)
"""Validation prompts, not used in RL. The warm start was trained on demonstrations of all numbers."""
TRAIN = tuple(number for number in NUMBERS if number not in HELD_OUT)


def prompt_text(number: int) -> str:
    """Return the prompt for ``number``, four tokens: ``^07=`` for 7."""
    return f"{BEGIN}{number:02d}{EQUALS}"


def demonstration(number: int, rng: random.Random, calls: float | None = None) -> str:
    """Return a random right response with the stop token, of 4 to 100 tokens.

    The largest allowed digit is drawn per response, so that lengths for one number vary widely. Too long
    responses are drawn again. With ``calls``, responses have no remainders, except for a share ``calls`` of
    them, which ask a tool for each remainder (``tool.py``).
    """
    calling = calls is not None and rng.random() < calls
    while True:
        largest = rng.choice((3, 4, 5, 7, 9, 9))
        left, groups = number, []
        while left:
            digit = rng.randint(1, min(left, largest))
            left -= digit
            note = "" if calls is not None and not calling else f"{left:02d}"
            groups.append(f"{digit}{EQUALS if calling else ''}{note}")
        response = "".join(groups) + STOP
        if len(response) <= MAX_RESPONSE_TOKENS:
            return response


def write_prompts(folder: Path) -> None:
    """Write ``train.jsonl`` and ``validation.jsonl``, which has the held-out numbers."""
    for name, numbers in (("train", TRAIN), ("validation", HELD_OUT)):
        rows = (json.dumps({"prompt": prompt_text(n), "answer": str(n)}) + "\n" for n in numbers)
        (folder / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8", newline="\n")
