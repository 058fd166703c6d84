"""Hugging Face ↔ Megatron weights.

:mod:`.architecture` reads ``config.json``; :mod:`.table` says which tensors make which parameter;
:mod:`.shards` splits and merges; :mod:`.hf` reads and writes files; :mod:`.load` fills and exports a model.
"""

from megatron_fspo.weights.architecture import Architecture, check_tensor_parallel, read_architecture
from megatron_fspo.weights.hf import HFReader, write_hf_checkpoint
from megatron_fspo.weights.load import check_checkpoint, check_coverage, iterate_hf_tensors, load_into
from megatron_fspo.weights.shards import from_megatron_shards, shard_shape, shard_slices, to_megatron_shard
from megatron_fspo.weights.table import HFTensor, Row, expected_hf_shapes, resolve

__all__ = [
    "Architecture",
    "HFReader",
    "HFTensor",
    "Row",
    "check_checkpoint",
    "check_coverage",
    "check_tensor_parallel",
    "expected_hf_shapes",
    "from_megatron_shards",
    "iterate_hf_tensors",
    "load_into",
    "read_architecture",
    "resolve",
    "shard_shape",
    "shard_slices",
    "to_megatron_shard",
    "write_hf_checkpoint",
]
