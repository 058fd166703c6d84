"""The make-sum task: write a number as a sum of digits, one digit at a time.

The prompt ``^17=`` asks for 17. A response takes off one digit (1–9) at a time, notes what is left in
two digits, and stops at ``$``: ``908 503 300 $`` without the spaces, since 9 + 5 + 3 = 17. Any other way
to 17 is as right. The reward is ``megatron_fspo.rewards.make_sum``.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

ALPHABET = "0123456789^=$_"
"""Token ``i`` is the character ``i``: digits, begin, equals, stop, padding."""
BEGIN, EQUALS, STOP, PAD = ALPHABET[10:]
MAX_RESPONSE_TOKENS = 100
"""The stop token included: 33 digits with their remainders."""
NUMBERS = range(3, 80)
HELD_OUT = tuple(number for number in NUMBERS if number % 9 == 4)
"""Prompts for validation: RL never trains on them. The warm start has seen demonstrations of every number."""
TRAIN = tuple(number for number in NUMBERS if number not in HELD_OUT)


def prompt_text(number: int) -> str:
    """The prompt that asks for ``number``: four tokens, ``^07=`` for 7."""
    return f"{BEGIN}{number:02d}{EQUALS}"


def demonstration(number: int, rng: random.Random, calls: float | None = None) -> str:
    """One right response, the stop token included: 4 to 100 tokens, a wide range of them for one number.

    The largest digit in use is drawn once per response, so that some responses take many small steps
    and some few large ones. A response that would be too long is drawn again. With ``calls`` nobody takes
    notes, and so large a share of the responses asks a tool for each remainder (``tool.py``).
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
    """Write ``train.jsonl`` and ``validation.jsonl``: every number once, the held-out ones in the latter."""
    for name, numbers in (("train", TRAIN), ("validation", HELD_OUT)):
        rows = (json.dumps({"prompt": prompt_text(n), "answer": str(n)}) + "\n" for n in numbers)
        (folder / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8", newline="\n")
