"""The policy losses: keys, gradient weights, definition and moving parts of each, in one file.

To add one, write a class like those here: its section of the configuration, its weights and definition, and
in ``VERIFIED`` settings that ``verify`` is to check. Then name it in ``AnyLoss``: configuration, trainer,
``verify``, ``explain``, ``sweep``, the report and docs/config.md find it here.
"""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import Field

from megatron_fspo.losses.cispo import CISPOLoss
from megatron_fspo.losses.common import Definition, Loss, LossState
from megatron_fspo.losses.ctpo import CTPOLoss
from megatron_fspo.losses.dppo import DPPOTVLoss
from megatron_fspo.losses.fspo import FSPOLoss
from megatron_fspo.losses.gmpo import GMPOLoss
from megatron_fspo.losses.prefix import CPPOLoss, PNPOLoss
from megatron_fspo.losses.ratio import GSPOLoss, LUSPOLoss, RLOOLoss
from megatron_fspo.losses.sapo import SAPOLoss
from megatron_fspo.losses.token import DAPOLoss, GRPOLoss, OPSMLoss
from megatron_fspo.losses.vespo import VESPOLoss

__all__ = ["Definition", "FSPOLoss", "Loss", "LossState", "PolicyLossConfig", "loss_sections"]

AnyLoss = (
    FSPOLoss
    | RLOOLoss
    | GSPOLoss
    | LUSPOLoss
    | CTPOLoss
    | VESPOLoss
    | GMPOLoss
    | GRPOLoss
    | DAPOLoss
    | CISPOLoss
    | SAPOLoss
    | OPSMLoss
    | DPPOTVLoss
    | CPPOLoss
    | PNPOLoss
)
PolicyLossConfig = Annotated[AnyLoss, Field(discriminator="name")]
"""The ``loss`` section of the configuration: one of them, by ``name``."""


def loss_sections() -> tuple[type[AnyLoss], ...]:
    """The sections of all losses."""
    return get_args(AnyLoss)
