"""The architecture of a model, read from a Hugging Face ``config.json``.

The conversion and ``mcore`` both take sizes from this record. Settings that Megatron would compute
differently from transformers (other biases, sliding windows, other kinds of RoPE) raise ``InputError``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_fspo.errors import InputError

SUPPORTED = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
# Megatron's scaled RoPE supports only these values, which Llama 3.1, 3.2 and 3.3 use.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
NEUTRAL_KEYS = frozenset(
    "_name_or_path architectures attention_dropout bos_token_id chunk_size_feed_forward eos_token_id id2label"
    " initializer_range is_encoder_decoder label2id max_window_layers output_attentions output_hidden_states"
    " output_router_logits pad_token_id pretraining_tp problem_type return_dict router_aux_loss_coef"
    " router_jitter_noise sliding_window transformers_version use_cache".split()
)
"""Keys that do not change what a model computes; all others of a supported family count or are refused."""
BACKWARD = 2
"""Cost of a backward pass in forward passes: one product for the inputs' gradient, one for the weights'."""
_LARGEST = 1e12
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixture of experts that replaces the MLP in every layer."""

    count: int
    per_token: int
    ffn_size: int
    normalize_top_k: bool
    """The routing weights of a token's experts are normalised to sum to 1."""


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Low-rank adapters of weight matrices: y = W x + scale · B A x."""

    rank: int
    scale: float
    targets: tuple[str, ...]
    """A subset of q, k, v, o, gate, up, down."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The sizes and settings of one model.

    Example (Qwen3-0.6B)::

        Architecture(model_type="qwen3", num_layers=28, hidden_size=1024, num_heads=16, num_kv_heads=8,
                     head_dim=128, ffn_size=3072, vocab_size=151936, tied=True, rms_norm_eps=1e-6,
                     rope_theta=1e6, max_position_embeddings=40960, dtype=torch.bfloat16)
    """

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
    experts: Experts | None = None
    adapters: Adapters | None = None
    """Adapters that are trained instead of the matrices."""
    max_position_embeddings: int
    dtype: torch.dtype
    """The dtype in ``config.json``. Tensors in the files may have others: see ``Reader.dtype``."""
    fp8_block: tuple[int, int] | None = field(default=None, compare=False)
    """Rows and columns of a weight that share one scale in an FP8 checkpoint; None for other checkpoints."""

    def function(self) -> dict[str, Any]:
        """Return what the weights mean, by name, as JSON types: every field and those of parts, without the
        format of the files and the longest sequence."""
        flat: dict[str, Any] = {}
        for name, value in vars(self).items():
            if name not in ("dtype", "fp8_block", "max_position_embeddings"):
                inner = vars(value) if is_dataclass(value) else {"": value}
                flat |= {f"{name}.{key}".rstrip("."): value for key, value in inner.items()}
        result: dict[str, Any] = json.loads(json.dumps(flat))
        return result

    @property
    def lora_rank(self) -> int:
        """Rank of the adapters; 0 without adapters."""
        return self.adapters.rank if self.adapters else 0

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_experts(self) -> int:
        """Experts of a layer; 0 in a dense model."""
        return self.experts.count if self.experts else 0

    @property
    def expert_ffn_size(self) -> int:
        """Hidden size of an expert's MLP; 0 in a dense model."""
        return self.experts.ffn_size if self.experts else 0

    @property
    def layer_size(self) -> int:
        """Parameters in one layer's matrices that a token uses, without the router."""
        ffn = self.experts.per_token * self.experts.ffn_size if self.experts else self.ffn_size
        return self.hidden_size * (2 * self.q_size + 2 * self.kv_size + 3 * ffn)


def read_architecture(checkpoint_dir: str | Path) -> Architecture:
    """Read the architecture of a checkpoint folder; raises ``InputError`` if the model is not supported."""
    config = _Config(Path(checkpoint_dir) / "config.json")
    model_type = config.required("model_type", str)
    if model_type not in SUPPORTED:
        raise config.error("model_type", f"is {model_type!r}; supported: {', '.join(SUPPORTED)}")
    _refuse_unsupported(config)
    arch = Architecture(
        model_type=model_type,
        num_layers=config.size("num_hidden_layers", most=10_000),
        hidden_size=config.size("hidden_size"),
        num_heads=config.size("num_attention_heads"),
        num_kv_heads=config.size("num_key_value_heads"),
        head_dim=_head_dim(config),
        ffn_size=config.size("intermediate_size"),
        vocab_size=config.size("vocab_size"),
        tied=config.required("tie_word_embeddings", bool),
        rms_norm_eps=config.positive("rms_norm_eps", config.optional("rms_norm_eps")),
        rope_theta=_rope_theta(config),
        rope_factor=_rope_factor(config),
        experts=_experts(config) if model_type in ("qwen3_moe", "mixtral") else None,
        max_position_embeddings=config.size("max_position_embeddings"),
        dtype=_dtype(config),
        fp8_block=_fp8_block(config),
    )
    if arch.num_heads % arch.num_kv_heads:
        problem = f"is {arch.num_kv_heads}, which does not divide num_attention_heads {arch.num_heads}"
        raise config.error("num_key_value_heads", problem)
    return arch


def check_tensor_parallel(arch: Architecture, tp_size: int, padded_vocab: int | None = None) -> None:
    """Raise ``InputError`` unless the model splits evenly over ``tp_size`` ranks."""
    if tp_size < 1:
        raise InputError(f"tensor-parallel size {tp_size} must be at least 1")
    counts = {"num_attention_heads": arch.num_heads, "num_key_value_heads": arch.num_kv_heads}
    if arch.experts is None:  # tensor parallelism does not split experts
        counts["intermediate_size"] = arch.ffn_size
    for key, count in counts.items():
        if count % tp_size:
            raise InputError(f"tensor-parallel size {tp_size} does not divide {key} {count}")
    if padded_vocab is not None and (padded_vocab < arch.vocab_size or padded_vocab % tp_size):
        raise InputError(
            f"padded vocabulary {padded_vocab} must be at least vocab_size {arch.vocab_size} "
            f"and a multiple of the tensor-parallel size {tp_size}"
        )


def forward_flops(
    arch: Architecture,
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    prompts: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
) -> int:
    """Return the FLOPs of a forward pass over separate sequences; a multiply-add counts as 2.

    A sequence of T = prompt + response tokens, L of them written by the policy, costs, with P =
    ``layer_size``::

        2 · layers · P · T  +  2 · layers · q_size · T²  +  2 · vocabulary · hidden · L

    The second term is causal attention: q·k and weights·v over T² / 2 pairs each. Norms, softmax and RoPE are
    omitted, as is usual. ``lengths`` has each L, by default that of the response. Neighbours with equal
    numbers in ``prompts`` share their prompt except its last token. All rows of a trajectory count as one
    sequence, an upper bound.
    """
    lengths = response_lengths if lengths is None else lengths

    def layers(tokens: int) -> int:
        return 2 * arch.num_layers * (arch.layer_size * tokens + arch.q_size * tokens**2)

    flops = 0
    for i, (prompt, response, length) in enumerate(
        zip(prompt_lengths, response_lengths, lengths, strict=True)
    ):
        flops += layers(prompt + response) + 2 * arch.vocab_size * arch.hidden_size * length
        if i and prompts is not None and prompts[i] == prompts[i - 1]:
            flops -= layers(prompt - 1)
    return flops


def _fp8_block(config: _Config) -> tuple[int, int] | None:
    quantization = config.optional("quantization_config")
    if quantization is None:
        return None
    block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    if (
        not isinstance(block, list)
        or quantization.get("quant_method") != "fp8"
        or [type(size) for size in block] != [int, int]
        or min(block) < 1
    ):
        problem = "must be FP8 with a weight_block_size of two sizes, or absent"
        raise config.error("quantization_config", problem)
    return block[0], block[1]


class _Config:
    """``config.json`` with errors that name the file and the key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise InputError(f"{path} is missing; a Hugging Face checkpoint folder must have it")
        try:
            values = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise InputError(f"{path} must be a JSON object")
        self.values: dict[str, Any] = values

    def error(self, key: str, problem: str) -> InputError:
        return InputError(f"{self.path}: {key} {problem}")

    def optional(self, key: str) -> Any:
        """Return the value, or None if the key is absent or null: transformers writes both for "unset"."""
        return self.values.get(key)

    def required(self, key: str, *types: type) -> Any:
        value = self.optional(key)
        if value is None:
            raise self.error(key, "is missing")
        if type(value) not in types:  # not isinstance: true is an int
            raise self.error(key, f"is {value!r}; it must be {' or '.join(t.__name__ for t in types)}")
        return value

    def size(self, key: str, most: int = 2**24) -> int:
        value: int = self.required(key, int)
        if not 1 <= value <= most:
            raise self.error(key, f"is {value!r:.50}; it must be from 1 to {most}")
        return value

    def positive(self, key: str, value: Any) -> float:
        """Return ``value``, which a key has, as a finite number above 0."""
        if type(value) not in (int, float) or not 0 < value <= _LARGEST:
            raise self.error(key, f"is {value!r:.50}; it must be a number above 0, at most {_LARGEST:g}")
        return float(value)


def _refuse_unsupported(config: _Config) -> None:
    for key, legal in {
        "attention_bias": "the biases of Qwen2's q, k and v are",
        "mlp_bias": "the biases of Qwen2's q, k and v are",
        "use_sliding_window": "full attention is",
    }.items():
        if config.optional(key):
            raise config.error(key, f"is true; only {legal} supported")
    if config.required("hidden_act", str) != "silu":
        raise config.error("hidden_act", f"is {config.values['hidden_act']!r}; only 'silu' is supported")
    kinds = config.optional("layer_types") or []
    other = [kind for kind in kinds if kind != "full_attention"] if isinstance(kinds, list) else [kinds]
    if other:
        raise config.error("layer_types", f"has {other[0]!r:.50}; only 'full_attention' is supported")


def _head_dim(config: _Config) -> int:
    """Read head_dim; models other than Qwen3 may omit it, and it is then hidden_size / heads."""
    if config.optional("head_dim") is not None or config.values["model_type"].startswith("qwen3"):
        return config.size("head_dim")
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if hidden % heads:
        raise config.error("hidden_size", f"is {hidden}, not a multiple of num_attention_heads {heads}")
    return hidden // heads


def _experts(config: _Config) -> Experts:
    if config.optional("decoder_sparse_step") not in (None, 1) or config.optional("mlp_only_layers"):
        raise config.error("mlp_only_layers", "or decoder_sparse_step: all layers must have experts")
    mixtral = config.values["model_type"] == "mixtral"
    if mixtral and config.optional("sliding_window") is not None:  # Qwen3 has use_sliding_window
        raise config.error("sliding_window", "is set; only full attention is supported")
    experts = Experts(
        # Mixtral and transformers 5 write num_local_experts; Qwen3-MoE's files on the Hub have num_experts.
        count=config.size("num_experts" if "num_experts" in config.values else "num_local_experts"),
        per_token=config.size("num_experts_per_tok"),
        ffn_size=config.size("intermediate_size" if mixtral else "moe_intermediate_size"),
        normalize_top_k=mixtral or config.required("norm_topk_prob", bool),
    )
    if experts.per_token > experts.count:
        raise config.error("num_experts_per_tok", f"is {experts.per_token}; num_experts is {experts.count}")
    return experts


def _rope_theta(config: _Config) -> float:
    """Read theta from ``rope_parameters`` (transformers 5), ``rope_theta`` or ``rope_scaling`` (4)."""
    thetas = [config.optional("rope_theta"), *(rope.get("rope_theta") for _, rope in _ropes(config))]
    given = [config.positive("rope_theta", theta) for theta in thetas if theta is not None]
    if not given:
        raise config.error("rope_theta", "is missing at the top level and in rope_parameters")
    if len(set(given)) > 1:
        raise config.error("rope_theta", f"is {given[0]!r}, but rope_parameters has {given[1]!r}")
    if given[0] != int(given[0]):
        raise config.error("rope_theta", f"is {given[0]!r}; Megatron supports whole numbers only")
    return given[0]


def _ropes(config: _Config) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.optional(key) or {}
        if not isinstance(rope, Mapping):
            raise config.error(key, f"is {rope!r}; it must be an object")
        yield key, rope


def _rope_factor(config: _Config) -> float | None:
    """Read the factor of scaled RoPE; None if RoPE is not scaled."""
    factors: set[float] = set()
    for key, rope in _ropes(config):
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise config.error(key, "has a partial_rotary_factor; only full rotation is supported")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "llama3":
            for name, value in _LLAMA3_ROPE.items():
                if rope.get(name) != value:
                    raise config.error(key, f"has {name} {rope.get(name)!r}; only {value} is supported")
            factors.add(config.positive(f"{key}.factor", rope.get("factor")))
        elif kind != "default":
            raise config.error(key, f"has rope_type {kind!r}; only 'default' and 'llama3' are supported")
    if len(factors) > 1:
        raise config.error("rope_scaling", f"and rope_parameters have different factors: {factors}")
    return factors.pop() if factors else None


def _dtype(config: _Config) -> torch.dtype:
    """Read the dtype: transformers 5 writes ``dtype``, transformers 4 ``torch_dtype``."""
    key = "torch_dtype" if config.optional("dtype") is None and "torch_dtype" in config.values else "dtype"
    name = config.required(key, str)
    if name not in _DTYPES:
        raise config.error(key, f"is {name!r}; supported: {', '.join(_DTYPES)}")
    return _DTYPES[name]
