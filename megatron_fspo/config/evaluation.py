"""The ``evaluation`` section of the configuration: sampling on the validation prompts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from megatron_fspo.section import Section


class Evaluation(Section):
    """Sampling on the validation prompts."""

    every: NonNegativeInt = Field(
        10, description="steps between evaluations, also before the first and after the last; 0: never"
    )
    samples: PositiveInt = Field(
        4,
        description="responses per prompt, k of mean@k, pass@k and maj@k; a set may have `samples` of its "
        "own",
    )
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
