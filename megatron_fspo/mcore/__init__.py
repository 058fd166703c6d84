"""The policy on Megatron-Core: models, losses on its schedules, checkpoints, decoding.

Its import says nothing of how Megatron is compiled: that is for the program to decide which imports it. Ours
decide with :func:`leave_uncompiled`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_fspo.mcore.engine import engine_problem

engine_problem()  # before Megatron tries to import Transformer Engine


def leave_uncompiled() -> None:
    """Import Megatron so that its fused functions are not compiled, where there is no GPU.

    It marks them for ``torch.compile`` while it is imported, and so loads torch's compiler, for seconds. On a
    CPU the fusions are off. This is for a whole process and for good, so only our own command lines call it,
    before anything else imports Megatron.
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
    """``torch.compile`` that does not."""
    return function or _as_it_is
