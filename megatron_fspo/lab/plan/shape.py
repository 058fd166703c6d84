"""What a plan starts from: model, layout and job, and the parameters of each pipeline stage.

Sizes are in bytes unless noted otherwise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from megatron_fspo.config import Parallel
from megatron_fspo.mcore.machine.sizes import padded_vocab_size
from megatron_fspo.weights import Architecture, shard_shape
from megatron_fspo.weights.row import Row
from megatron_fspo.weights.table import adapter_rows, rows

Layers = Literal["local", "transformer_engine"]

# The order in which Megatron creates the modules of a layer.
_ORDER = (
    *("input_layernorm", "self_attention.core_attention"),
    *("self_attention.linear_proj", "self_attention.linear_qkv"),
    *(f"self_attention.{one}" for one in ("conv_weight", "A_log", "dt_bias", "in_proj", "out_norm")),
    "self_attention.out_proj",
    *(f"self_attention.linear_{one}_proj" for one in ("q", "q_down", "q_up", "kv_down", "kv_up")),
    *(f"self_attention.{one}_layernorm" for one in ("q", "k", "kv")),
    *("self_attn_bda", "pre_mlp_layernorm", "mlp.router", "mlp.linear_fc1", "mlp.experts"),
    *("mlp.shared_experts", "mlp.linear_fc2", "mlp_bda"),
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model distributed over ranks."""

    arch: Architecture
    parallel: Parallel
    world: int
    """Number of ranks; fits the layout (:func:`~megatron_fspo.mcore.machine.sizes.check_world`)."""
    dtype: torch.dtype
    """Data type of parameters and activations."""
    layers: Layers
    device: Literal["cpu", "cuda"]
    recompute: bool = False
    fp8: bool = False
    kernels: bool = False
    """Whether :mod:`~megatron_fspo.parallel.triton_head` computes the log-probs."""

    @property
    def width(self) -> int:
        """Bytes per parameter and per activation value."""
        return self.dtype.itemsize

    @property
    def data(self) -> int:
        """Data-parallel size."""
        return self.world // self.parallel.model_size

    @property
    def reduced_over(self) -> int:
        """Number of ranks that sum gradients and share a distributed optimizer: data × context."""
        return self.data * self.parallel.context

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding, summed over all tensor-parallel ranks."""
        return padded_vocab_size(self.arch.vocab_size, self.parallel.tensor)

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and of the output layer on one rank."""
        return self.padded_vocab // self.parallel.tensor

    @property
    def chunk_layers(self) -> int:
        """Layers of a model chunk; a pipeline stage has ``virtual_pipeline`` chunks."""
        return self.arch.num_layers // (self.parallel.pipeline * self.parallel.virtual_pipeline)

    def numbers(self, stage: int, chunk: int) -> range:
        """Return the layers of a model chunk, numbered over the model."""
        first = (chunk * self.parallel.pipeline + stage) * self.chunk_layers
        return range(first, first + self.chunk_layers)

    def kinds(self, stage: int, chunk: int) -> dict[bool, int]:
        """Return how many layers of a chunk have experts (True) and an MLP (False); what there is only."""
        return Counter(number >= self.arch.dense_layers for number in self.numbers(stage, chunk))

    def linear(self, stage: int, chunk: int) -> int:
        """Return how many layers of a chunk have linear attention."""
        return sum(self.arch.layer_type(number) == "linear" for number in self.numbers(stage, chunk))

    def is_last(self, stage: int, chunk: int | None = None) -> bool:
        """Return whether this is the last chunk of the model or, without ``chunk``, the last stage."""
        last = self.parallel.virtual_pipeline - 1
        return stage == self.parallel.pipeline - 1 and chunk in (None, last)


@dataclass(frozen=True, kw_only=True)
class PlannedPack:
    """A micro-batch of the plan."""

    lengths: tuple[int, ...]
    """Lengths of its sequences with padding, over all context-parallel ranks."""
    scored: int
    """Tokens on this rank that need log-probs."""

    @property
    def tokens(self) -> int:
        """Tokens over all context-parallel ranks."""
        return sum(self.lengths)


def between(shape: Shape, pack: PlannedPack) -> float:
    """Return a rank's tokens outside of the tensor-parallel regions, where sequence parallel splits them."""
    rank = pack.tokens / shape.parallel.context
    return rank / shape.parallel.tensor if shape.parallel.sequence else rank


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter as one rank holds it."""

    name: str
    """Name in ``GPTModel.named_parameters()``."""
    shape: tuple[int, ...]
    expert: bool = False
    """True if expert parallel distributes it; tensor parallel then does not."""
    frozen: bool = False
    """True if adapters are trained instead."""
    shared: bool = False
    """True for a tied embedding that both the first and the last of several pipeline stages hold."""

    @property
    def count(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


def stage_parameters(shape: Shape, stage: int) -> list[list[Parameter]]:
    """Return the parameters of a rank of the stage: a list per model chunk, in Megatron's order."""
    return [list(_chunk_parameters(shape, stage, chunk)) for chunk in range(shape.parallel.virtual_pipeline)]


def _chunk_parameters(shape: Shape, stage: int, chunk: int) -> Iterator[Parameter]:
    arch, apart, table = shape.arch, shape.parallel.pipeline > 1, rows(shape.arch)
    embedding, norm, output = (row for row in table if not row.in_layer)
    if stage == chunk == 0:
        yield _parameter(shape, embedding, shared=arch.tied and apart)
    # The bias of routers is no parameter.
    held = (row for row in table if row.in_layer and not row.key.endswith("expert_bias"))
    layer_rows = sorted(held, key=lambda row: _position(row, shape.layers))
    for layer, number in enumerate(shape.numbers(stage, chunk)):
        for row in (row for row in layer_rows if row.is_in(arch, number)):
            for expert in range(arch.num_experts // shape.parallel.expert if row.in_expert else 1):
                yield _parameter(shape, row, layer=layer, expert=expert)
        for row in adapter_rows(arch):
            yield replace(_parameter(shape, row, layer=layer), frozen=False)
    if shape.is_last(stage, chunk):
        yield _parameter(shape, norm)
        if apart or not arch.tied:
            yield _parameter(shape, output, shared=arch.tied)


def _parameter(shape: Shape, row: Row, *, layer: int = 0, expert: int = 0, shared: bool = False) -> Parameter:
    tensor = 1 if row.in_expert else shape.parallel.tensor
    return Parameter(
        name=_name(row, shape.layers).format(layer=layer, expert=expert),
        shape=shard_shape(row, shape.arch, tensor, shape.padded_vocab),
        expert=row.in_expert,
        frozen=shape.arch.adapters is not None,
        shared=shared,
    )


def _name(row: Row, layers: Layers) -> str:
    return row.megatron[0 if layers == "local" else -1]


def _position(row: Row, layers: Layers) -> tuple[int, str]:
    """Return the sort key of a row in a layer: module, then (as Transformer Engine) norm, weight, bias."""
    name = _name(row, layers).partition("{layer}.")[2]
    module = next(i for i, known in enumerate(_ORDER) if name.startswith(known))
    first = name.endswith(("layer_norm_weight", "gate_weight"))
    kind = "2" if ".bias" in name else "0" if first else "1"
    return module, kind
