"""The policy on Megatron-Core: models, losses on its schedules, checkpoints, decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_fspo.mcore.engine import engine_problem


def _as_it_is(function: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
    """``torch.compile`` that does not."""
    return function or _as_it_is


if not torch.cuda.is_available():
    # Megatron compiles its fused functions while it is imported, and so loads torch's compiler, for seconds.
    # On a CPU the fusions are off.
    _compile = torch.compile
    torch.compile = _as_it_is  # type: ignore[assignment]
    try:
        engine_problem()
        import megatron.core.jit  # noqa: F401
    finally:
        torch.compile = _compile
else:
    engine_problem()  # before Megatron tries to import it
