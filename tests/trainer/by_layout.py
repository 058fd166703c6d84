"""What a worker finds in each of several layouts, as JSON in the file that its command line names."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_fspo.mcore.machine.startup import stop


def write_by_layout(layouts: Sequence[str], find: Callable[[str], Any]) -> None:
    """``find`` starts the layout of a name, on every rank; the first rank writes."""
    found = {}
    for layout in layouts:
        found[layout] = find(layout)
        writer = dist.get_rank() == 0
        stop()
    if writer:
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
