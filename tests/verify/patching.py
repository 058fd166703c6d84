"""What a fault is, and how to put one into the production code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

Patch = AbstractContextManager[Any]

# The layouts, and a group of this rank only.
CP, DP, TP, PP, SP = "cp2.dp2", "dp4", "tp2.pp2", "pp2.cp2", "tp2.sp.cp2"
ALONE: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What to break, where it shows, and the cause that is named first."""

    patch: Callable[[], Patch]
    """Entered on every rank before the model is built."""
    layout: str
    cause: str
    """Of the first problem, a key of ``verify.compare.CAUSES``."""
    figures: str = ""
    """Part of the figures that follow it."""
    loss: str = "fspo"
    split: str = "2 micro-batches"
    tied: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32)
    """Where it can be seen; in the other precision all is well."""

    @property
    def what(self) -> str:
        """One line."""
        assert self.patch.__doc__ is not None
        return self.patch.__doc__


FAULTS: dict[str, Fault] = {}
"""Filled by the modules of faults."""


def fault(layout: str, cause: str, **where: Any) -> Callable[[Callable[[], Patch]], None]:
    """Enter a function that returns the patch; its docstring says what is broken."""

    def enter(patch: Callable[[], Patch]) -> None:
        assert patch.__name__ not in FAULTS
        FAULTS[patch.__name__] = Fault(patch=patch, layout=layout, cause=cause, **where)

    return enter


def wrap(owner: Any, name: str, replacement: Callable[..., Any]) -> Patch:
    """``owner.name(...)`` becomes ``replacement(the original, ...)``."""
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(real, *args, **kwargs)

    return mock.patch.object(owner, name, call)
