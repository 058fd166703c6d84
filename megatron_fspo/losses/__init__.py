"""The policy losses: of each its keys, its gradient weights and its definition, in one file.

To add one, write a class like those here (its section of the configuration, with ``objective`` and
``definition``, and in ``VERIFIED`` settings that ``verify`` is to check), and name it in ``SequenceLoss`` if
it has a band on S, else in ``OtherLoss``. Configuration, trainer, ``verify``, the report and docs/config.md
find it here.
"""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import Field

from megatron_fspo.losses.cispo import CISPOLoss
from megatron_fspo.losses.common import Definition, Loss
from megatron_fspo.losses.ctpo import CTPOLoss
from megatron_fspo.losses.dppo import DPPOTVLoss
from megatron_fspo.losses.fspo import FSPOLoss
from megatron_fspo.losses.gmpo import GMPOLoss
from megatron_fspo.losses.ratio import GSPOLoss, LUSPOLoss, RLOOLoss
from megatron_fspo.losses.sapo import SAPOLoss
from megatron_fspo.losses.token import DAPOLoss, GRPOLoss, OPSMLoss
from megatron_fspo.losses.vespo import VESPOLoss
from megatron_fspo.objective import ClipBand

__all__ = [
    "CISPOLoss",
    "CTPOLoss",
    "DAPOLoss",
    "DPPOTVLoss",
    "Definition",
    "FSPOLoss",
    "GMPOLoss",
    "GRPOLoss",
    "GSPOLoss",
    "LUSPOLoss",
    "Loss",
    "OPSMLoss",
    "PolicyLossConfig",
    "RLOOLoss",
    "SAPOLoss",
    "VESPOLoss",
    "band_of",
    "loss_sections",
]

SequenceLoss = FSPOLoss | RLOOLoss | GSPOLoss | LUSPOLoss
OtherLoss = (
    CTPOLoss | VESPOLoss | GMPOLoss | GRPOLoss | DAPOLoss | CISPOLoss | SAPOLoss | OPSMLoss | DPPOTVLoss
)
AnyLoss = SequenceLoss | OtherLoss
PolicyLossConfig = Annotated[AnyLoss, Field(discriminator="name")]
"""The ``loss`` section of the configuration: one of them, by ``name``."""


def loss_sections() -> tuple[type[AnyLoss], ...]:
    """The sections of all losses."""
    return get_args(AnyLoss)


def band_of(loss: PolicyLossConfig) -> ClipBand | None:
    """The band on S; None for a loss that decides token by token, or weighs without a limit."""
    return loss.band() if isinstance(loss, SequenceLoss) else None
