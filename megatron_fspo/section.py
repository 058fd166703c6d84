"""The base class of configuration sections, which losses are."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0, le=1)]
UnitInterval = Annotated[float, Field(gt=0, lt=1)]


class Section(BaseModel):
    """A configuration section: rejects unknown keys and non-finite numbers, accepts ``2`` for ``"2"``."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False)
