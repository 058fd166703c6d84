"""A tool for make-sum: it knows what is left of the number. See tools.toml."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_fspo.types import Prompt


def remainder(prompt: Prompt, turns: Sequence[str]) -> str | float:
    """Answer a turn that ends in ``=``, after a digit, with what is left in two digits, which the policy else
    has to know by itself. At the end the reward is 1 if the digits sum to the number, else 0."""
    written = "".join(turns)
    left = int(prompt.answer) - sum(map(int, re.findall("[1-9]", written)))
    sound = re.fullmatch("([1-9]=?)*", written) is not None
    if sound and left >= 0 and turns[-1].endswith("="):
        return f"{left:02d}"
    return float(sound and left == 0)
