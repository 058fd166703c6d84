"""Sizes of everything under tests/gpu: on a GPU, and where the same code runs on a fake one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from backend import FAKE
from megatron_fspo.lab.plan.presets import PRESETS
from megatron_fspo.weights import Architecture

QWEN3_8B = PRESETS["qwen3-8b"]
_TINY = replace(
    QWEN3_8B,
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=96,
    vocab_size=61,
    max_position_embeddings=512,
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """An optimizer step, or responses sampled side by side: so many of a prompt and a response."""

    model: Architecture
    sequences: int
    prompt: int
    response: int
    max_tokens: int = 0
    """Tokens of a micro-batch."""
    layers: int = 0
    """Layers at most: a layer is like another."""

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(prompt, response) tokens; responses of a quarter, two, three quarters and the whole."""
        return [(self.prompt, self.response * (1 + i % 4) // 4) for i in range(self.sequences)]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of every measurement."""

    noise: Step
    """The measurement of FP8 noise. Its other packs have half the tokens."""
    quantized: tuple[int, int]
    """Rows and columns of the tensors that quantizers get."""
    ring: Step
    decoding: Step
    step: Step
    """One of Qwen3-8B: with as many of its layers as fit the memory."""
    head: dict[str, int]
    """tokens, hidden, vocab."""
    long_head: dict[str, int]
    """The same of a whole micro-batch, whose logits nothing holds."""
    sent: Architecture
    """A model whose weights are sent."""


FULL = Sizes(
    noise=Step(
        model=replace(QWEN3_8B, num_layers=8, hidden_size=1024, num_heads=8, ffn_size=3072, vocab_size=32768),
        sequences=32,
        prompt=64,
        response=448,
        max_tokens=8192,
    ),
    quantized=(4096, 4096),
    ring=Step(
        model=replace(QWEN3_8B, num_layers=4, vocab_size=32768),
        sequences=4,
        prompt=64,
        response=8000,
        max_tokens=16384,
    ),
    decoding=Step(
        model=PRESETS["qwen3-0.6b"],
        sequences=64,
        prompt=128,
        response=128,
    ),
    step=Step(model=QWEN3_8B, sequences=16, prompt=256, response=3840, max_tokens=16384, layers=8),
    head={"tokens": 8192, "hidden": 4096, "vocab": 151936},
    long_head={"tokens": 32768, "hidden": 4096, "vocab": 151936},
    sent=replace(QWEN3_8B, num_layers=4),
)
TINY = Sizes(
    noise=Step(model=_TINY, sequences=6, prompt=3, response=40, max_tokens=256),
    quantized=(64, 256),
    ring=Step(model=_TINY, sequences=4, prompt=3, response=40, max_tokens=128),
    decoding=Step(model=_TINY, sequences=3, prompt=4, response=6),
    step=Step(model=_TINY, sequences=4, prompt=3, response=40, max_tokens=128, layers=2),
    head={"tokens": 64, "hidden": 32, "vocab": 200},
    long_head={"tokens": 128, "hidden": 32, "vocab": 200},
    sent=_TINY,
)
SIZES = TINY if FAKE else FULL
