"""Conversion of weights between Hugging Face and Megatron.

:mod:`.table` maps Hugging Face tensors to Megatron parameters. Readers and writers handle both formats on
disk, and :mod:`.load` copies a checkpoint into a running model and exports a running model.
"""

from megatron_fspo.weights.architecture import Adapters, Architecture, Experts, check_tensor_parallel
from megatron_fspo.weights.hf_config import read_architecture
from megatron_fspo.weights.hf_reader import HFReader
from megatron_fspo.weights.hf_writer import write_hf_checkpoint
from megatron_fspo.weights.load import (
    Stacks,
    check_checkpoint,
    check_coverage,
    is_megatron,
    iterate_hf_tensors,
    load_into,
    open_checkpoint,
)
from megatron_fspo.weights.manifest import (
    Difference,
    Manifest,
    TensorRecord,
    compare,
    compare_with_manifest,
    read_manifest,
)
from megatron_fspo.weights.megatron_reader import MegatronReader
from megatron_fspo.weights.megatron_writer import write_megatron_checkpoint
from megatron_fspo.weights.peft import read_adapters, write_adapters
from megatron_fspo.weights.reader import Reader, row_blocks, size_in_bytes, stream
from megatron_fspo.weights.row import (
    Row,
    from_megatron_shards,
    shard_shape,
    shard_slices,
    to_megatron_shard,
)
from megatron_fspo.weights.table import adapter_shapes, expected_hf_shapes, has_parameter, resolve

__all__ = [
    "Adapters", "Architecture", "Difference", "Experts", "HFReader", "Manifest", "MegatronReader", "Reader",
    "Row", "Stacks", "TensorRecord", "adapter_shapes", "check_checkpoint", "check_coverage",
    "check_tensor_parallel", "compare", "compare_with_manifest", "expected_hf_shapes", "from_megatron_shards",
    "has_parameter", "is_megatron", "iterate_hf_tensors", "load_into", "open_checkpoint", "read_adapters",
    "read_architecture", "read_manifest", "resolve", "row_blocks", "shard_shape", "shard_slices",
    "size_in_bytes", "stream", "to_megatron_shard", "write_adapters", "write_hf_checkpoint",
    "write_megatron_checkpoint",
]  # fmt: skip
