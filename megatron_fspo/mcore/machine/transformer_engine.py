"""Whether Transformer Engine works on this machine, and what it supports."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable

import torch

FP8_RECIPES = {
    "tensorwise": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}
"""Recipe → function of ``transformer_engine.pytorch`` that tells whether this GPU supports it."""


@functools.cache
def engine_problem() -> str | None:
    """Return why Transformer Engine cannot be used here, as a clause; None if it can.

    Layers need the compiled torch extension, of the same version as the metapackage. If its import fails, the
    package counts as not installed in this process, because Megatron handles no error but ``ImportError``.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed"
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:  # also AssertionError and OSError
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
            del sys.modules[name]
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
        reason = next(iter(str(error).strip().rstrip(".").splitlines()), "")
        return f"transformer_engine.pytorch cannot be imported ({type(error).__name__}: {reason})"
    return None


def engine_version() -> str:
    """Return the version of Transformer Engine, which must be importable."""
    import transformer_engine

    return str(transformer_engine.__version__)


def cudnn_version() -> str:
    """Return the version of cuDNN that Transformer Engine loaded."""
    from transformer_engine.pytorch.utils import get_cudnn_version

    return ".".join(map(str, get_cudnn_version()))


def fp8_problems() -> dict[str, str | None]:
    """Return the recipe → why this GPU does not support it; None if it does."""
    import transformer_engine.pytorch as engine

    problems: dict[str, str | None] = {}
    for recipe, name in FP8_RECIPES.items():
        ask: Callable[..., tuple[bool, str]] = getattr(engine, name)
        available, reason = ask(return_reason=True)
        problems[recipe] = None if available else reason.strip().rstrip(".")
    return problems


def attention_backend(
    *, num_heads: int, num_kv_heads: int, head_dim: int, max_tokens: int, context: int = 1
) -> str:
    """Return the attention that Transformer Engine uses for packed bf16 sequences of up to ``max_tokens``:
    ``flash``, ``fused``, ``unfused`` (memory grows with the square of the length) or ``none``. Heads are
    those of one rank; ``context`` is the context-parallel size."""
    from transformer_engine.pytorch.attention.dot_product_attention.utils import (
        AttentionParams,
        get_attention_backend,
    )

    answer = get_attention_backend(
        AttentionParams(
            qkv_dtype=torch.bfloat16,
            qkv_layout="thd_thd_thd",
            num_heads=num_heads,
            num_gqa_groups=num_kv_heads,
            head_dim_qk=head_dim,
            head_dim_v=head_dim,
            max_seqlen_q=max_tokens,
            max_seqlen_kv=max_tokens,
            num_tokens_q=max_tokens,
            num_tokens_kv=max_tokens,
            attn_mask_type="padding_causal",
            window_size=(-1, 0),
            context_parallel=context > 1,
            cp_size=context,
        )
    )
    flash, _, fused, _, unfused, *_ = answer
    return "flash" if flash else "fused" if fused else "unfused" if unfused else "none"
