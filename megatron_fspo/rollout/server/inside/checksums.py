"""Checksums of the weights in a vLLM worker, which the trainer compares with its own.

``--worker-extension-cls`` adds :class:`WorkerExtension` to vLLM's workers. ``POST /collective_rpc
{"method": "weight_checksums"}`` calls its method in each worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_fspo.rollout.checksum import PACKED, checksum
from megatron_fspo.rollout.server.inside.adapters import factors

_ROWS = 256  # unit vectors at a time


class WorkerExtension:
    """Becomes a base class of vLLM's worker."""

    get_model: Any  # the worker's

    def weight_checksums(self) -> dict[str, list[str]]:
        """Return ``Checksum.to_words`` of each tensor of this worker."""
        model = self.get_model()
        return {
            name: checksum(tensor).to_words() for each in (weights, factors) for name, tensor in each(model)
        }


@torch.no_grad()
def weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield this worker's shards of a vLLM model's weights under Hugging Face names. Fused tensors are split,
    and rows that pad the vocabulary are removed. The packed copy with which a linear layer computes on a CPU,
    often the only one, is yielded as "NAME (packed)"."""
    fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    names = {id(parameter): name for name, parameter in model.named_parameters()}  # of tied ones, the first
    for path, layer in model.named_modules():
        for key, parameter in layer.named_parameters(recurse=False):
            name = names[id(parameter)]
            if parameter.numel() and name == f"{path}.{key}":
                yield from _pieces(name, parameter, layer, fused)
            # An embedding has a packed copy too, but does not compute with it.
            computes = hasattr(layer, "cpu_linear") and type(layer).__name__ != "VocabParallelEmbedding"
            if key == "weight" and computes:
                for piece, tensor in _pieces(name, _packed(layer), layer, fused):
                    yield piece + PACKED, tensor


def _packed(layer: Any) -> Tensor:
    """Return the packed weight [out, in], by applying the layer to unit vectors."""
    sizes = ("input_size_per_partition", "input_size", "embedding_dim")
    inputs = next(getattr(layer, name) for name in sizes if hasattr(layer, name))
    units = torch.eye(inputs, dtype=layer.weight.dtype)
    return torch.cat([layer.cpu_linear(rows, layer.weight, None) for rows in torch.split(units, _ROWS)]).t()


def _pieces(
    name: str, tensor: Tensor, layer: Any, fused: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, Tensor]]:
    if hasattr(layer, "shard_indices"):  # sharded by vocabulary
        tensor = tensor[: layer.shard_indices.num_org_elements]
    name = name.replace(".base_layer.", ".")  # in a layer with an adapter
    path, module, key = ("." + name).rsplit(".", 2)
    modules = fused.get(module, ())
    sizes = getattr(layer, "output_partition_sizes", ())
    if len(modules) == len(sizes) > 0 and tensor.shape[0] == sum(sizes):
        for submodule, piece in zip(modules, torch.split(tensor, list(sizes)), strict=True):
            yield f"{path}.{submodule}.{key}"[1:], piece
    else:
        yield name, tensor
