"""A tool for make-sum that returns the remainder. See tools.toml."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_fspo.types import Prompt


def remainder(prompt: Prompt, turns: Sequence[str]) -> str | float:
    """Reply to a turn that ends with a digit and ``=`` with the remainder in two digits. Any other turn ends
    the trajectory, with reward 1 if its digits sum to the number, else 0."""
    written = "".join(turns)
    left = int(prompt.answer) - sum(map(int, re.findall("[1-9]", written)))
    sound = re.fullmatch("([1-9]=?)*", written) is not None
    if sound and left >= 0 and turns[-1].endswith("="):
        return f"{left:02d}"
    return float(sound and left == 0)
