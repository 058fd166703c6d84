"""The backend under test: this machine's CPU; or, in ``make test-te``, Transformer Engine on a fake GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from megatron_fspo.config import Parallel

BACKEND: Literal["cpu", "cuda"] = "cuda" if os.environ.get("TEST_BACKEND") == "cuda" else "cpu"
ENGINE = BACKEND == "cuda"
"""Whether layers are Transformer Engine's."""


def supported(layouts: dict[str, Parallel], but: Sequence[str] = ()) -> dict[str, Parallel]:
    """Those that the backend has: context parallel attention of Transformer Engine needs a GPU.

    Args:
        but: names of others that ``make test-te`` leaves out for the sake of time.
    """
    return {
        name: layout
        for name, layout in layouts.items()
        if not (ENGINE and (layout.context > 1 or name in but))
    }
