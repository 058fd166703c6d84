"""A section of the configuration, which the keys of a loss are: the base of all."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0, le=1)]
UnitInterval = Annotated[float, Field(gt=0, lt=1)]


class Section(BaseModel):
    """Strict about names, lenient about spelling (``2`` for ``"2"``); numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False)
