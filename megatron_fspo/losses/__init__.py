"""The policy losses, each in one file: configuration keys, gradient weights, definition, moving limits.

To add a loss, write a subclass of :class:`Loss` with its keys, weights, ``definition`` and the settings that
``verify`` checks (``VERIFIED``), and add it to ``AnyLoss``. Configuration, trainer, ``verify``, ``explain``,
``sweep``, the report and docs/config.md then include it.
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
from megatron_fspo.losses.sft import SFTLoss
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
    | SFTLoss
)
PolicyLossConfig = Annotated[AnyLoss, Field(discriminator="name")]
"""The ``loss`` section of the configuration: one of the losses, selected by ``name``."""


def loss_sections() -> tuple[type[AnyLoss], ...]:
    """Return the classes of all losses."""
    return get_args(AnyLoss)
