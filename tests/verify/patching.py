"""What a fault is, and how to put one into the production code."""

from __future__ import annotations

import functools
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
MOE, EP = "moe.tp2.sp.dp2", "tp2.sp.ep2.dp2"
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
    replay: bool = False
    share: bool = False
    tied: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32)
    """Where it can be seen; in the other precision all is well."""


FAULTS: dict[str, Fault] = {}
"""Filled by the modules of faults."""


def fault(layout: str, cause: str, *place: Any, **where: Any) -> Callable[[Callable[..., Any]], None]:
    """Enter a function whose docstring says what is broken. With a place, which is an owner and a name, it is
    called there with the original and its arguments; without one it returns the patch."""

    def enter(function: Callable[..., Any]) -> None:
        assert function.__name__ not in FAULTS
        patch = functools.wraps(function)(lambda: wrap(*place, function)) if place else function
        FAULTS[function.__name__] = Fault(patch=patch, layout=layout, cause=cause, **where)

    return enter


def wrap(owner: Any, name: str, replacement: Callable[..., Any]) -> Patch:
    """``owner.name(...)`` becomes ``replacement(the original, ...)``."""
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(real, *args, **kwargs)

    return mock.patch.object(owner, name, call)
