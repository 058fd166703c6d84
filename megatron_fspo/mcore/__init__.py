"""The policy on Megatron-Core: models, losses on its schedules, checkpoints, decoding.

Importing this package leaves Megatron's use of ``torch.compile`` to the program; ours call
:func:`leave_uncompiled` first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_fspo.mcore.machine.transformer_engine import engine_problem

engine_problem()  # before Megatron tries to import Transformer Engine


def leave_uncompiled() -> None:
    """On a machine without a GPU, import Megatron with ``torch.compile`` disabled, for the whole process.

    Otherwise the import loads torch's compiler, for seconds, to compile fused functions that CPU runs do not
    use. Call this before anything else imports Megatron.
    """
    if torch.cuda.is_available():
        return
    compiling = torch.compile
    torch.compile = _as_it_is  # type: ignore[assignment]
    try:
        import megatron.core.jit  # noqa: F401
    finally:
        torch.compile = compiling


def _as_it_is(function: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
    """Return a replacement for ``torch.compile`` that returns the function unchanged."""
    return function or _as_it_is
