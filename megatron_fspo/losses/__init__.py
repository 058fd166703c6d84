"""The policy losses: of each its keys, its gradient weights and its definition, in one file.

To add one, write a class like those here (its section of the configuration, with ``objective`` and
``definition``, and in ``VERIFIED`` settings that ``verify`` is to check), and name it in ``PolicyLossConfig``
and :func:`band_of`: the type checker asks for what is missing. Configuration, trainer, ``verify``, the report
and docs/config.md find it here.
"""

from __future__ import annotations

from typing import Annotated, assert_never, get_args

from pydantic import Field

from megatron_fspo.losses.cispo import CISPOLoss
from megatron_fspo.losses.common import Definition, Loss
from megatron_fspo.losses.fspo import FSPOLoss
from megatron_fspo.losses.ratio import GSPOLoss, RLOOLoss
from megatron_fspo.losses.token import DAPOLoss, GRPOLoss
from megatron_fspo.objective import ClipBand

__all__ = [
    "CISPOLoss",
    "DAPOLoss",
    "Definition",
    "FSPOLoss",
    "GRPOLoss",
    "GSPOLoss",
    "Loss",
    "PolicyLossConfig",
    "RLOOLoss",
    "band_of",
    "loss_sections",
]

AnyLoss = FSPOLoss | RLOOLoss | GSPOLoss | GRPOLoss | DAPOLoss | CISPOLoss
PolicyLossConfig = Annotated[AnyLoss, Field(discriminator="name")]
"""The ``loss`` section of the configuration: one of them, by ``name``."""


def loss_sections() -> tuple[type[AnyLoss], ...]:
    """The sections of all losses."""
    return get_args(AnyLoss)


def band_of(loss: PolicyLossConfig) -> ClipBand | None:
    """The band on S; None for a loss that decides token by token."""
    match loss:
        case FSPOLoss() | RLOOLoss() | GSPOLoss():
            return loss.band()
        case GRPOLoss() | DAPOLoss() | CISPOLoss():
            return None
        case _:
            assert_never(loss)
