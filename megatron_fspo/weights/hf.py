"""Hugging Face checkpoints on disk: safetensors in, safetensors out, never a pickle.

:class:`HFReader` reads lazily: opening parses headers, ``read`` copies the asked part and no more.
:func:`write_hf_checkpoint` streams: it holds the tensors of one file, and ``out_dir`` appears once whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_fspo.errors import InputError
from megatron_fspo.weights.architecture import read_architecture
from megatron_fspo.weights.table import expected_hf_shapes

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# What makes a folder usable beside its weights; weights in other formats and code stay behind.
_SIDE_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip


class HFReader:
    """The tensors of a checkpoint folder, by name. A context manager; use it inside ``with``."""

    def __init__(self, checkpoint_dir: str | Path) -> None:
        self.folder = Path(checkpoint_dir)
        self._files: dict[str, Path] = {}
        self._handles: dict[Path, Any] = {}
        index, single = self.folder / INDEX, self.folder / SINGLE
        if index.is_file() and single.is_file():
            raise InputError(f"{self.folder} has both {SINGLE} and {INDEX}: remove the stale one")
        if not index.is_file() and not single.is_file():
            raise InputError(f"{self.folder} has neither {SINGLE} nor {INDEX}")
        with ExitStack() as stack:
            weight_map = _read_index(index) if index.is_file() else {}
            for path in sorted({self.folder / file for file in weight_map.values()}) or [single]:
                self._open(path, stack)
            for name, file in weight_map.items():
                if self._files.get(name) != self.folder / file:
                    raise InputError(f"{index}: {file} does not hold {name}")
            if unlisted := self._files.keys() - weight_map.keys() if weight_map else ():
                raise InputError(f"{index} does not list {min(unlisted)} of {self._files[min(unlisted)]}")
            self._stack = stack.pop_all()

    def _open(self, path: Path, stack: ExitStack) -> None:
        if not path.is_file():
            raise InputError(f"{path} not found; {INDEX} names it")
        try:
            handle = stack.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise InputError(f"{path} is truncated, or not a safetensors file: {error}") from error
        self._handles[path] = handle
        for name in handle.keys():
            if name in self._files:
                raise InputError(f"{name} is in both {self._files[name]} and {path}")
            self._files[name] = path

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def names(self) -> set[str]:
        return set(self._files)

    def file(self, name: str) -> Path:
        """The file that holds a tensor."""
        if name not in self._files:
            raise InputError(f"{self.folder} has no tensor {name}")
        return self._files[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in the file; ``InputError`` unless it is a plain float."""
        dtype = self._slice(name).get_dtype()
        if dtype not in _DTYPES:
            raise InputError(f"{name} in {self.file(name)} is {dtype}; supported: {', '.join(_DTYPES)}")
        return _DTYPES[dtype]

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        """A copy of the tensor, or of the part ``slices`` selects, on the CPU."""
        tensor: Tensor = self._slice(name)[... if slices is None else slices]
        return tensor

    def _slice(self, name: str) -> Any:
        return self._handles[self.file(name)].get_slice(name)


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not an index with a weight_map: {error!r}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{path}: weight_map must be an object that names tensors")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise InputError(f"{path}: {file!r} is not the name of a file beside it")
    return weight_map


def write_hf_checkpoint(
    out_dir: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    source_dir: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Write ``tensors`` with the config and tokenizer of ``source_dir``, the checkpoint the model came from.

    ``tensors`` must be exactly those the config asks for, in any order. Each gets ``dtype`` (and the config
    says so), or else the dtype it has in ``source_dir``. An earlier checkpoint at ``out_dir`` is replaced at
    the end; until then, and after any error, ``out_dir`` is as it was.
    """
    out, source = Path(out_dir).resolve(), Path(source_dir).resolve()
    shapes = expected_hf_shapes(read_architecture(source))
    if out.exists() and not (out.is_dir() and ((out / "config.json").is_file() or not any(out.iterdir()))):
        raise InputError(f"{out} exists and is not a checkpoint folder; it will not be replaced")
    if source.is_relative_to(out):
        raise InputError(f"{out} holds the source checkpoint {source}; write somewhere else")
    partial = out.with_name(f".{out.name}.partial")
    if partial.exists():  # of a run that was killed
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        _copy_side_files(source, partial, dtype)
        read_architecture(partial)  # what we publish, we can read
        with ExitStack() as stack:
            if dtype is None:
                reader = stack.enter_context(HFReader(source))
                dtypes = {name: reader.dtype(name) for name in shapes}
            else:
                dtypes = dict.fromkeys(shapes, dtype)
            _write_files(partial, _cast_and_check(tensors, shapes, dtypes), max_shard_bytes)
        _replace(out, partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # renamed away, unless something failed


def _copy_side_files(source: Path, partial: Path, dtype: torch.dtype | None) -> None:
    for file in _SIDE_FILES:
        if (source / file).is_file():
            shutil.copyfile(source / file, partial / file)
    if dtype is not None:
        config = json.loads((source / "config.json").read_bytes())
        for key in {"dtype", "torch_dtype"} & config.keys():
            config[key] = str(dtype).removeprefix("torch.")
        (partial / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _cast_and_check(
    tensors: Iterable[tuple[str, Tensor]],
    shapes: dict[str, tuple[int, ...]],
    dtypes: dict[str, torch.dtype],
) -> Iterator[tuple[str, Tensor]]:
    """Own CPU tensors in the file's dtype; ``InputError`` unless they are exactly those of ``shapes``."""
    missing = dict(shapes)
    for name, tensor in tensors:
        if name not in missing:
            problem = "given twice" if name in shapes else "not a tensor of this architecture"
            raise InputError(f"{name}: {problem}")
        expected = missing.pop(name)
        if tuple(tensor.shape) != expected:
            raise InputError(f"{name}: shape {tuple(tensor.shape)}, config.json makes it {expected}")
        # A copy even where nothing changes: the giver may use its buffer again.
        cast = torch.empty(expected, dtype=dtypes[name]).copy_(tensor.detach())
        if not cast.isfinite().all():
            raise InputError(f"{name}: not finite in {str(cast.dtype).removeprefix('torch.')}; not written")
        yield name, cast
    if missing:
        raise InputError(f"{len(missing)} tensors were not given, {min(missing)} among them; nothing written")


def _write_files(folder: Path, tensors: Iterator[tuple[str, Tensor]], max_shard_bytes: int) -> None:
    files: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = held_bytes = 0

    def flush() -> None:
        files.append(list(held))
        save_file(held, folder / f"{len(files)}.safetensors", metadata={"format": "pt"})
        held.clear()

    for name, tensor in tensors:
        if held and held_bytes + tensor.nbytes > max_shard_bytes:
            flush()
            held_bytes = 0
        held[name] = tensor
        held_bytes += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(files) == 1:
        (folder / "1.safetensors").rename(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")


def _replace(out: Path, partial: Path) -> None:
    """Put ``partial`` in the place of ``out``; a folder there stays whole beside it until that is done."""
    if not out.exists():
        partial.rename(out)
        return
    old = out.with_name(f".{out.name}.old")
    if old.exists():  # of a run that was killed after this function put the new one in place
        shutil.rmtree(old)
    out.rename(old)
    try:
        partial.rename(out)
    except BaseException:
        old.rename(out)
        raise
    shutil.rmtree(old)
