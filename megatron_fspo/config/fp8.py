"""The ``fp8`` section of the configuration: precision of matrix products."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, field_validator

from megatron_fspo.section import Section

_ALIGN = {"none": (1, 1), "tensorwise": (16, 16), "blockwise": (128, 16), "mxfp8": (32, 32)}
"""Recipe → divisors of the rows of a tensor-parallel rank and of the widths of the model. Rows of blockwise
come in whole blocks, since Transformer Engine gathers others in bfloat16 under sequence parallel."""


class FP8(Section):
    """Matrix products of Transformer Engine layers in FP8.

    Parameters stay in bfloat16, master weights in fp32. Head, log-probs and S are computed without FP8.
    """

    recipe: Literal["none", "blockwise", "mxfp8", "tensorwise"] = Field(
        "none",
        description="scaling; blockwise: per 128 values (Hopper); mxfp8: per 32 (Blackwell); tensorwise: "
        "per tensor, so log-probs depend on the rest of the pack",
    )
    format: Literal["e4m3", "hybrid"] = Field("e4m3", description="hybrid: gradients in e5m2")
    first_last_layers_bf16: NonNegativeInt = Field(0, description="layers at each end kept in bfloat16")

    @field_validator("recipe", mode="before")
    @classmethod
    def _no_delayed(cls, value: Any) -> Any:
        if value == "delayed":
            raise ValueError(
                "delayed is not supported: its scales depend on earlier passes, so old and new log-probs "
                "would differ, and Transformer Engine does not restore them from checkpoints"
            )
        return value

    def check(self, *, dtype: str, layers: str, backend: str) -> None:
        """Raise ``ValueError`` if keys of the ``model`` section exclude FP8."""
        if self.recipe == "none":
            return
        asked = {"dtype": (dtype, "float32"), "layers": (layers, "local"), "backend": (backend, "cpu")}
        for key, (value, wrong) in asked.items():
            if value == wrong:
                raise ValueError(
                    f"fp8.recipe = {self.recipe} needs bfloat16 and layers of Transformer Engine on a GPU, "
                    f"not model.{key} = {value}"
                )

    @property
    def align(self) -> int:
        """Divisor of the number of rows of a product."""
        return _ALIGN[self.recipe][0]

    @property
    def width_align(self) -> int:
        """Divisor of the widths of weights."""
        return _ALIGN[self.recipe][1]


BF16 = FP8()
"""The section without FP8."""
