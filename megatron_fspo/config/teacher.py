"""The ``teacher`` section of the configuration: the model to distil."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from megatron_fspo.section import Section


class Teacher(Section):
    """The reference of the KL penalty, to distil it; default: `model.checkpoint`."""

    checkpoint: Path | None = Field(
        None,
        description="Hugging Face checkpoint with the policy's vocabulary, loaded in the policy's layout",
    )
    urls: tuple[str, ...] = Field(
        (), description="vLLM servers of the teacher instead; key in `VLLM_API_KEY`"
    )

    @property
    def in_use(self) -> bool:
        """True if the reference is another model than ``model.checkpoint``."""
        return self != Teacher()

    def check(self, *, kl_coef: float, temperature: float) -> None:
        """Raise ``ValueError`` if the teacher conflicts with ``loss.kl_coef`` or ``rollout.temperature``."""
        if self.in_use and not kl_coef:
            raise ValueError("[teacher] needs loss.kl_coef > 0, the coefficient of the KL to it")
        if self.checkpoint and self.urls:
            raise ValueError("teacher.checkpoint and teacher.urls exclude each other")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"teacher.urls: {url!r} must be http://host:port")
        if self.urls and temperature != 1:
            raise ValueError(
                f"teacher.urls needs rollout.temperature = 1, not {temperature:g}: servers score at 1"
            )
