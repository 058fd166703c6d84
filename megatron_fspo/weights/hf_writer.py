"""Write Hugging Face checkpoints as a stream: only one tensor, or one block of its rows, is in memory."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megatron_fspo.errors import InputError
from megatron_fspo.weights.folder import copy_side_files, new_checkpoint
from megatron_fspo.weights.hf_config import read_architecture
from megatron_fspo.weights.hf_reader import INDEX, SINGLE
from megatron_fspo.weights.load import is_megatron, open_checkpoint
from megatron_fspo.weights.manifest import Manifest, TensorRecord, check_record
from megatron_fspo.weights.reader import check_finite, dtype_name
from megatron_fspo.weights.table import expected_hf_shapes, is_passed

Shape = tuple[int, ...]
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write_hf_checkpoint(
    out_dir: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    source_dir: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 2**30,
    layout: Mapping[str, int] | None = None,
    recorded: Mapping[str, TensorRecord] | None = None,
) -> Manifest:
    """Write ``tensors``, a manifest with their hashes, and the config and tokenizer of ``source_dir``.

    ``out_dir`` appears, or replaces an earlier checkpoint there, only when it is complete.

    Args:
        out_dir: the new checkpoint.
        tensors: exactly those that the config requires, in any order; each whole, or as consecutive blocks of
            rows (dimension 0) under one name.
        source_dir: the checkpoint that the model came from. A multimodal model's other tensors are copied.
        dtype: of all tensors, also written to the config. None: each tensor has its dtype in ``source_dir``.
        max_shard_bytes: largest size of a file; a file with a single tensor may exceed it.
        layout: parallel sizes of the exported model, for the manifest.
        recorded: the source manifest's records, which tensors of the same dtype must match.

    Raises:
        InputError: a tensor is missing, unexpected, given twice, mis-shaped, not finite, or not as recorded.
    """
    source = Path(source_dir)
    arch = read_architecture(source)
    shapes = expected_hf_shapes(arch)
    if dtype is not None and dtype not in _NAMES:
        raise InputError(f"dtype is {dtype_name(dtype)!r}; only plain floats can be written")
    passed: list[str] = []
    if dtype is None or arch.prefix != "model.":
        reader = open_checkpoint(source, arch)
        passed = [name for name in sorted(reader.names()) if is_passed(name, arch)]
    if arch.prefix != "model." and is_megatron(source):
        raise InputError(f"{source} has only the text part of the model in its config.json")
    if dtype is None:
        dtypes = {name: reader.dtype(name) for name in shapes}
    else:
        dtypes = dict.fromkeys(shapes, dtype)
    shapes |= {name: reader.shape(name) for name in passed}
    dtypes |= {name: reader.dtype(name) for name in passed}
    total = sum(torch.Size(shape).numel() * dtypes[name].itemsize for name, shape in shapes.items())
    with new_checkpoint(out_dir, source, total) as folder:
        copy_side_files(source, folder, dtype)
        read_architecture(folder)  # the written config must be readable
        files = _plan(shapes, dtypes, max_shard_bytes)
        with _Files(folder, files, recorded or {}) as written:
            for name, block in chain(tensors, ((name, reader.read(name)) for name in passed)):
                written.write(name, block)
            records = written.finish()
        if len(files) > 1:
            weight_map = {name: file for file, spans in files.items() for name in spans}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        manifest = Manifest.new("huggingface", source, arch, layout or {}, records)
        manifest.save(folder)
    return manifest


@dataclass(frozen=True)
class _Span:
    """A tensor's shape, dtype, and byte range in the data of its file."""

    shape: Shape
    dtype: torch.dtype
    first: int
    end: int


def _plan(
    shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype], max_shard_bytes: int
) -> dict[str, dict[str, _Span]]:
    """Distribute the tensors over files: file name → tensor name → span."""
    files: list[list[str]] = [[]]
    sizes = {name: torch.Size(shape).numel() * dtypes[name].itemsize for name, shape in shapes.items()}
    held = 0
    for name, size in sizes.items():
        if files[-1] and held + size > max_shard_bytes:
            files.append([])
            held = 0
        files[-1].append(name)
        held += size
    plan: dict[str, dict[str, _Span]] = {}
    for number, names in enumerate(files, 1):
        file = SINGLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        plan[file], first = {}, 0
        # Wider dtypes first, so that all tensors are aligned.
        for name in sorted(names, key=lambda name: -dtypes[name].itemsize):
            plan[file][name] = _Span(shapes[name], dtypes[name], first, first + sizes[name])
            first += sizes[name]
    return plan


def _header(spans: Mapping[str, _Span]) -> bytes:
    """The header of a safetensors file: its length, then JSON padded with spaces to a multiple of 8 bytes."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, span in spans.items():
        offsets = [span.first, span.end]
        table[name] = {"dtype": _NAMES[span.dtype], "shape": list(span.shape), "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class _Files:
    """The open safetensors files of a plan; checks everything that is written into them."""

    def __init__(
        self, folder: Path, plan: Mapping[str, Mapping[str, _Span]], recorded: Mapping[str, TensorRecord]
    ) -> None:
        self._recorded = recorded
        self._spans = {name: span for spans in plan.values() for name, span in spans.items()}
        self._files: dict[str, tuple[BinaryIO, int]] = {}
        self._records: dict[str, TensorRecord] = {}
        self._open = ""  # the tensor being written
        self._rows = 0
        self._hash = sha256()
        with ExitStack() as stack:  # closes all if one fails, such as on a full disk
            for file, spans in plan.items():
                stream = stack.enter_context(open(folder / file, "wb"))
                start = stream.write(_header(spans))
                stream.truncate(start + max(span.end for span in spans.values()))
                self._files |= dict.fromkeys(spans, (stream, start))
            self._stack = stack.pop_all()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def write(self, name: str, block: Tensor) -> None:
        if name != self._open:
            if name in self._records or name not in self._spans:
                problem = "given twice" if name in self._records else "not a tensor of this architecture"
                raise InputError(f"{name}: {problem}")
            self._open, self._rows, self._hash = name, 0, sha256()
        span = self._spans[name]
        shape = tuple(block.shape)
        if not shape or shape[1:] != span.shape[1:] or self._rows + shape[0] > span.shape[0]:
            got = f"a block of shape {shape} after {self._rows} rows"
            raise InputError(f"{name}: {got}; config.json requires {span.shape}")
        values = block.detach().to(device="cpu", dtype=span.dtype).contiguous()
        check_finite(values, name)
        data = values.view(torch.uint8).numpy().data if values.numel() else b""
        stream, start = self._files[name]
        stream.seek(start + span.first + self._rows * (span.end - span.first) // span.shape[0])
        stream.write(data)
        self._hash.update(data)
        self._rows += shape[0]
        if self._rows == span.shape[0]:
            self._records[name] = TensorRecord(span.shape, span.dtype, self._hash.hexdigest())
            check_record(name, self._records[name], self._recorded)
            self._open = ""

    def finish(self) -> dict[str, TensorRecord]:
        """Return the records by name; raises ``InputError`` unless all tensors were written completely."""
        if missing := self._spans.keys() - self._records.keys():
            raise InputError(f"{len(missing)} tensors were not written completely, such as {min(missing)}")
        return self._records
