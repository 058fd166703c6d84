"""The ``checkpoint`` section of the configuration: what a run can resume from."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveInt

from megatron_fspo.section import Section


class Checkpoint(Section):
    """What a run can resume from."""

    every: NonNegativeInt = Field(
        10, description="steps between checkpoints, also after the last and on SIGTERM; 0: only then"
    )
    keep: PositiveInt = Field(2, description="newest checkpoints to keep")
    milestones: NonNegativeInt = Field(
        0, description="every so many steps a checkpoint that is kept for ever, besides the newest; 0: none"
    )
    asynchronous: bool = Field(
        False,
        description="train on while files are written, from a copy in host memory of each rank's part "
        "(up to 14 bytes per parameter of it); the checkpoint appears after the step that finds them written",
    )
