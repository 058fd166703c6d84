"""Transformer Engine's attention, replaced by ours for packs with shared prompts, whose mask it lacks."""

from __future__ import annotations

from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_fspo.mcore.model.packed_attention import layer_window, make_sinks, packed_attention


class SharingAttention(TEDotProductAttention):  # type: ignore[misc, unused-ignore]
    """Core attention with Megatron's arguments: [t, h, d] and [t, g, d] → [t, h·d]."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.softmax_offset = make_sinks(config)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        batch = getattr(kwargs.get("packed_seq_params"), "batch", None)
        if batch is None or not batch.prefixes:
            out: Tensor = super().forward(query, key, value, *args, **kwargs)
            return out
        borders = batch.on_host.borders.tolist()
        window = layer_window(self.config, self.layer_number)
        how: Any = {"scale": self.softmax_scale, "window": window, "sinks": self.softmax_offset}
        return packed_attention(query, key, value, borders, batch.prefixes, **how).flatten(1)
