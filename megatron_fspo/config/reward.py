"""The ``reward`` section of the configuration: the verdict on a response."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt

from megatron_fspo.section import Section


class Reward(Section):
    """The verdict on a response."""

    name: str = Field(description="`make_sum`, `exact_match`, or `package.module:function`")
    max_steps_without_spread: NonNegativeInt = Field(
        10,
        description="an error when in so many steps in a row no two responses to a prompt had different "
        "rewards, so that nothing was learned; 0: never",
    )
