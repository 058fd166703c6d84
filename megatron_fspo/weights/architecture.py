"""The architecture of a model: its sizes and settings.

The conversion and ``mcore`` both read this record; :mod:`.hf_config` makes it from a ``config.json``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, Literal

import torch

from megatron_fspo.errors import InputError

LayerType = Literal["full", "window", "linear"]


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixture of experts that replaces the MLP in a layer."""

    count: int
    per_token: int
    ffn_size: int
    normalize_top_k: bool
    """The routing weights of a token's experts are normalised to sum to 1, before ``scale``."""
    dense_layers: int = 0
    """The first layers, which have an MLP instead."""
    shared_ffn_size: int = 0
    """Hidden size of the shared expert, which every token uses; 0: there is none."""
    sigmoid: bool = False
    """Scores are sigmoids, to which the choice, but not the weight, adds a bias of each expert. Otherwise
    they are a softmax."""
    scale: float = 1.0
    """Factor of the routing weights."""
    groups: int = 1
    """A token's experts are in ``group_top_k`` of these groups, by the sums of their two best choices."""
    group_top_k: int = 1
    clamp: float | None = None
    """Limit of gate (above) and up, with which an expert computes gate · sigmoid(1.702 · gate) · (up + 1);
    None: silu(gate) · up."""


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """RoPE stretched to longer sequences (arXiv 2309.00071), by Megatron's names."""

    rotary_scaling_factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    """Angles' factor 0.1 · mscale · ln(scaling factor) + 1, over the same of ``mscale_all_dim``."""
    mscale_all_dim: float
    """Latent attention's factor is the square of the like."""
    correction_range_round_to_int: bool = True
    """The range of the values between the two frequencies is rounded to whole ones."""


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Attention whose queries, keys and values are products of low rank (arXiv 2405.04434)."""

    q_rank: int | None
    """None: queries are projected directly."""
    kv_rank: int
    rope_size: int
    """The last values of a head of query and key, which are rotated. All heads share those of the key."""
    value_size: int
    """Values of a head."""

    @property
    def kv_down_size(self) -> int:
        """Rows of the projection to ``kv_rank``, with the rotated values of the key."""
        return self.kv_rank + self.rope_size


@dataclass(frozen=True, kw_only=True)
class LinearAttention:
    """Gated delta nets (arXiv 2412.06464): a value head writes into a state, which a key head addresses."""

    key_heads: int
    value_heads: int
    """A multiple of ``key_heads``; neighbours share a key head."""
    key_size: int
    value_size: int
    conv: int
    """Tokens that the convolution of queries, keys and values sees."""

    @property
    def keys(self) -> int:
        """Values of a token's keys, and of its queries."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Values of a token's values, and of its gates."""
        return self.value_heads * self.value_size

    @property
    def qkvz(self) -> int:
        """Rows of the projections of queries, keys, values and gates."""
        return 2 * (self.keys + self.values)

    @property
    def ba(self) -> int:
        """Rows of the projections of the rates of writing and of decay."""
        return 2 * self.value_heads


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Low-rank adapters of weight matrices: y = W x + scale · B A x."""

    rank: int
    scale: float
    targets: tuple[str, ...]
    """A subset of q, k, v, o, gate, up, down."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The sizes and settings of one model (examples: ``lab/plan/presets.py``)."""

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Not always hidden_size / num_heads."""
    ffn_size: int
    vocab_size: int
    """Rows of the Hugging Face embedding; Megatron may pad its own."""
    tied: bool
    """The output layer shares the embedding's weight."""
    rms_norm_eps: float
    rope_theta: float
    rope_factor: float | None = None
    """Factor of Llama 3's scaled RoPE, which stretches long wavelengths; None: RoPE is not scaled."""
    rope_divisor: float = 1.0
    """Positions are divided by it before RoPE."""
    window_rope_theta: float | None = None
    """Base of RoPE in layers with a window, where it is not scaled; None: that of all layers."""
    yarn: Yarn | None = None
    rotary_share: float = 1.0
    """Share of a head's values that are rotated: the first."""
    rotary_interleaved: bool = False
    """Neighbouring values are rotated together, otherwise those half of the rotated values apart."""
    window: int | None = None
    """Tokens that a token attends to, itself included, in layers with a window; None: all before it."""
    layer_types: tuple[LayerType, ...] = ()
    """What each layer attends to: all tokens before, the window, or a recurrent state. The pattern repeats;
    empty: all layers have the window, if there is one."""
    zero_centered_norms: bool = False
    """Norms multiply by 1 + weight."""
    gelu: bool = False
    """The gate of the MLP is GELU in its tanh form, not SiLU."""
    attention_scale: float | None = None
    """Factor of query · key; None: 1 / √head_dim."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of what attention and MLP add to the residual stream."""
    logits_divisor: float = 1.0
    qkv_bias: bool = False
    """In families with the choice: biases of query, key and value."""
    qk_norm: bool = False
    """In families with the choice: norms of the heads of query and key."""
    output_gate: bool = False
    """What attention returns is multiplied by gates, which the query projection computes, too: for each head
    its query, then its gate."""
    latent: LatentAttention | None = None
    linear: LinearAttention | None = None
    """Attention of the linear layers."""
    experts: Experts | None = None
    adapters: Adapters | None = None
    """Adapters that are trained instead of the matrices."""
    max_position_embeddings: int
    unused_layers: int = 0
    """Layers in the files that predict further tokens (MTP); they are neither trained nor exported."""
    prefix: str = "model."
    """Of the text model's names in the files. With another one, the files have further tensors, such as those
    of a vision tower; exports have them, too."""
    dtype: torch.dtype
    """The dtype in ``config.json``. Tensors in the files may have others: see ``Reader.dtype``."""
    fp8_block: tuple[int, int] | None = field(default=None, compare=False)
    """Rows and columns of a weight that share one scale in an FP8 checkpoint; None for other checkpoints."""

    def function(self) -> dict[str, Any]:
        """Return what the weights mean, by name, as JSON types: every field and those of parts, without the
        format of the files, unused layers and the longest sequence."""
        flat: dict[str, Any] = {}
        for name, value in vars(self).items():
            if name not in ("dtype", "fp8_block", "max_position_embeddings", "prefix", "unused_layers"):
                inner = vars(value) if is_dataclass(value) else {"": value}
                flat |= {f"{name}.{key}".rstrip("."): value for key, value in inner.items()}
        result: dict[str, Any] = json.loads(json.dumps(flat))
        return result

    @property
    def projection_norms(self) -> bool:
        """Norms of query and key are over all heads together."""
        return self.model_type in ("olmo2", "olmo3")

    def embedding_factor(self, dtype: torch.dtype) -> float:
        """Return the factor of embeddings of this dtype, to which transformers rounds that of Gemma."""
        if not self.model_type.startswith("gemma"):
            return self.embedding_scale
        return torch.tensor(self.hidden_size**0.5).to(dtype).item()

    @property
    def lora_rank(self) -> int:
        """Rank of the adapters; 0 without adapters."""
        return self.adapters.rank if self.adapters else 0

    @property
    def q_size(self) -> int:
        """Values of a token's queries."""
        return self.num_heads * self.head_dim

    @property
    def q_rows(self) -> int:
        """Rows of the query projection."""
        return self.q_size * (1 + self.output_gate)

    @property
    def state_size(self) -> int:
        """Values of a sequence's state in a linear layer; 0 without."""
        return self.linear.values * self.linear.key_size if self.linear else 0

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def value_size(self) -> int:
        """Values that attention returns for a token, over all heads."""
        return self.num_heads * (self.latent.value_size if self.latent else self.head_dim)

    @property
    def kv_up_size(self) -> int:
        """Rows of the projection from that rank: of each head, unrotated key and value; 0 without."""
        return self.q_size - self.num_heads * self.latent.rope_size + self.value_size if self.latent else 0

    @property
    def one(self) -> int:
        return 1

    @property
    def num_experts(self) -> int:
        """Experts of a layer; 0 in a dense model."""
        return self.experts.count if self.experts else 0

    @property
    def expert_ffn_size(self) -> int:
        """Hidden size of an expert's MLP; 0 in a dense model."""
        return self.experts.ffn_size if self.experts else 0

    @property
    def expert_gate_up_size(self) -> int:
        """Rows of gate and up of an expert; 0 in a dense model."""
        return 2 * self.expert_ffn_size

    @property
    def shared_ffn_size(self) -> int:
        """Hidden size of the shared expert; 0 without."""
        return self.experts.shared_ffn_size if self.experts else 0

    @property
    def dense_layers(self) -> int:
        """Layers with an MLP, which come before those with experts."""
        return self.experts.dense_layers if self.experts else self.num_layers

    def layer_type(self, layer: int) -> LayerType:
        """Return what a layer attends to."""
        if self.layer_types:
            return self.layer_types[layer % len(self.layer_types)]
        return "full" if self.window is None else "window"

    def count(self, kind: LayerType) -> int:
        """Return the number of layers of a kind."""
        return sum(self.layer_type(layer) == kind for layer in range(self.num_layers))

    @property
    def softmax_layers(self) -> int:
        """Number of layers whose tokens attend to earlier ones."""
        return self.num_layers - self.count("linear")

    @property
    def uniform(self) -> bool:
        """All layers have the same parameters."""
        return self.dense_layers in (0, self.num_layers) and "linear" not in self.layer_types

    def shortened(self) -> Architecture:
        """Return the model with the fewest layers that have one of every kind."""
        kinds = tuple(dict.fromkeys(self.layer_types))
        dense = min(self.dense_layers, 1) if self.experts else 0
        experts = self.experts and replace(self.experts, dense_layers=dense)
        return replace(self, num_layers=max(1 + dense, len(kinds)), layer_types=kinds, experts=experts)

    @property
    def attention_size(self) -> int:
        """Parameters in the matrices of one layer's softmax attention."""
        if (latent := self.latent) is None:
            return self.hidden_size * (self.q_rows + self.q_size + 2 * self.kv_size)
        query = (latent.q_rank or 0) * (self.hidden_size + self.q_size) or self.hidden_size * self.q_size
        pair = self.hidden_size * latent.kv_down_size + latent.kv_rank * self.kv_up_size
        return query + pair + self.hidden_size * self.value_size

    @property
    def layer_size(self) -> int:
        """Parameters in the matrices of a layer that a token uses, without the router; rounded mean over the
        layers."""
        ffn = self.ffn_size * self.dense_layers
        if self.experts:
            active = self.experts.per_token * self.experts.ffn_size + self.experts.shared_ffn_size
            ffn += active * (self.num_layers - self.dense_layers)
        net = self.linear
        linear = self.hidden_size * (net.qkvz + net.ba + net.values) if net else 0
        attention = self.softmax_layers * self.attention_size + self.count("linear") * linear
        return round((attention + 3 * self.hidden_size * ffn) / self.num_layers)


def check_tensor_parallel(arch: Architecture, tp_size: int, padded_vocab: int | None = None) -> None:
    """Raise ``InputError`` unless the model splits evenly over ``tp_size`` ranks."""
    if tp_size < 1:
        raise InputError(f"tensor-parallel size {tp_size} must be at least 1")
    counts = {"num_attention_heads": arch.num_heads, "num_key_value_heads": arch.num_kv_heads}
    if arch.dense_layers:  # tensor parallelism does not split experts
        counts["intermediate_size"] = arch.ffn_size
    if arch.linear:
        counts |= {"linear_num_key_heads": arch.linear.key_heads}
    if arch.shared_ffn_size:
        counts["the shared expert's intermediate size"] = arch.shared_ffn_size
    for key, count in counts.items():
        if count % tp_size:
            raise InputError(f"tensor-parallel size {tp_size} does not divide {key} {count}")
    if padded_vocab is not None and (padded_vocab < arch.vocab_size or padded_vocab % tp_size):
        raise InputError(
            f"padded vocabulary {padded_vocab} must be at least vocab_size {arch.vocab_size} "
            f"and a multiple of the tensor-parallel size {tp_size}"
        )
