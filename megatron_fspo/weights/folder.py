"""Checkpoint folders: atomic creation, config and tokenizer files, and the hashes in ``SHA256SUMS``.

``sha256sum -c`` can read ``SHA256SUMS``. Its last line, a comment for that program, is the hash of the lines
before it, so any change to the list is detected.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch

from megatron_fspo.errors import InputError
from megatron_fspo.weights.reader import dtype_name

T = TypeVar("T")

SUMS = "SHA256SUMS"
_TRANSIENT = {errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EREMOTEIO}
_PAUSES = (0.5, 1.0, 2.0, 4.0)
"""Seconds before each retry of a read."""
_NOT_SIDE_FILES = tuple(
    ".safetensors .safetensors.index.json .bin .bin.index.json .pt .pth .gguf .h5 .msgpack .onnx .ot .distcp"
    " .py .pyc".split()
)
"""Ends of the names of files with weights or code."""


@contextmanager
def new_checkpoint(out_dir: str | Path, source_dir: Path, needed_bytes: int) -> Iterator[Path]:
    """Yield a folder to write a checkpoint in, which becomes ``out_dir`` if the block ends without an error.

    Until then, and after an error, an earlier checkpoint in ``out_dir`` is unchanged. Raises ``InputError``
    if ``out_dir`` is not a checkpoint folder or contains ``source_dir``, or if writing fails.
    """
    out, source = Path(out_dir).resolve(), source_dir.resolve()
    if out.exists() and not (out.is_dir() and ((out / "config.json").is_file() or not any(out.iterdir()))):
        raise InputError(f"{out} exists and is not a checkpoint folder; choose another output folder")
    if source.is_relative_to(out):
        raise InputError(f"{out} contains the source checkpoint {source}; choose another output folder")
    partial = out.with_name(f".{out.name}.partial")
    if not out.exists() and (old := _old(out)).exists():  # killed between the renames of _replace
        old.rename(out)
    created = [parent for parent in out.parents if not parent.exists()]
    try:
        if partial.exists():  # left by a killed run
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        free = shutil.disk_usage(partial).free
        if free < needed_bytes:
            raise InputError(f"{out.parent} has {free:,} bytes free; the checkpoint needs {needed_bytes:,}")
        yield partial
        _replace(out, partial)
    except OSError as error:
        raise InputError(f"{error.filename or out}: {error.strerror or error}; nothing written") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # exists only after an error
        for parent in created:
            with suppress(OSError):  # not empty: the checkpoint is in it
                parent.rmdir()


def side_files(folder: Path) -> list[Path]:
    """Return the paths in ``folder`` of all that is neither weights nor code: config, tokenizer, …"""
    return sorted(
        path.relative_to(folder)
        for path in [*folder.glob("[!.]*"), *folder.glob("additional_chat_templates/*")]
        if path.is_file()
        and path.name not in (SUMS, "manifest.json")
        and not path.name.endswith(_NOT_SIDE_FILES)
    )


def differing_side_files(first: Path, second: Path) -> list[str]:
    """Return the side files that two folders do not both have, or not with the same content. Not config.json,
    whose keys depend on the format of the weights."""
    one, other = (
        {str(path): digest(folder / path) for path in side_files(folder)} for folder in (first, second)
    )
    names = (one.keys() | other.keys()) - {"config.json"}
    return sorted(name for name in names if one.get(name) != other.get(name))


def copy_side_files(source: Path, folder: Path, dtype: torch.dtype | None) -> None:
    """Copy the :func:`side_files`; remove quantization from the config, and set its dtype if one is given."""
    for path in side_files(source):
        (folder / path).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / path, folder / path)
    config = json.loads((source / "config.json").read_bytes())
    changed = dict(config)
    names = {"dtype", "torch_dtype"}
    if changed.pop("quantization_config", None) and not names & config.keys():
        changed["dtype"] = "bfloat16"  # gpt-oss's has none
    if "text_config" in config:  # of a multimodal model
        changed["text_config"] = dict(config["text_config"])
    if dtype is not None:
        for part in (changed, changed.get("text_config", {})):
            part |= dict.fromkeys(names & part.keys(), dtype_name(dtype))
    if changed != config:
        text = json.dumps(changed, indent=2, ensure_ascii=False) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")


def _old(out: Path) -> Path:
    """Return the path of the earlier checkpoint while the new one is renamed."""
    return out.with_name(f".{out.name}.old")


def _replace(out: Path, partial: Path) -> None:
    """Rename ``partial`` to ``out``; an earlier folder stays beside it until that succeeds."""
    if not out.exists():
        partial.rename(out)
        return
    old = _old(out)
    if old.exists():  # left by a run that was killed after its renames
        shutil.rmtree(old)
    out.rename(old)
    try:
        partial.rename(out)
    except BaseException:
        old.rename(out)
        raise
    shutil.rmtree(old)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(*paths: Path) -> None:
    """Fsync files and folders."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems cannot sync folders.
            if error.errno != errno.EINVAL or not path.is_dir():
                raise
        finally:
            os.close(descriptor)


def write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Write ``SHA256SUMS`` from SHA-256 by relative path."""
    text = "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(sums.items()))
    (folder / SUMS).write_text(f"{text}# {_sha256(text)}\n", encoding="utf-8")


def read_sums(folder: Path) -> dict[str, str]:
    """Return relative path → SHA-256; raises as :func:`check_sums` if the list is damaged or unreadable."""
    path = folder / SUMS
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    text, _, last = raw.decode("utf-8", errors="replace").removesuffix("\n").rpartition("\n")
    if not raw.endswith(b"\n") or last != f"# {_sha256(text + chr(10))}":
        raise InputError(f"{path} is damaged: its last line is not the SHA-256 of the lines before it")
    pairs = (line.split("  ", 1) for line in text.split("\n"))
    return {name: sha256 for sha256, name in pairs}


def check_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Raise ``InputError`` for a damaged or unreadable file; the latter has an ``OSError`` as its cause."""
    for name, wanted in sums.items():
        path = folder / name
        try:
            actual = digest(path)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from error
        if actual != wanted:
            raise InputError(f"{path} is damaged: its SHA-256 differs from {SUMS}")


def patiently(read: Callable[[], T]) -> T:
    """Return ``read()``; retry after file system errors that may be transient."""
    for seconds in _PAUSES:
        try:
            return read()
        except (InputError, OSError) as error:
            failed = failed_read(error)
            if failed is None or failed.errno not in _TRANSIENT:
                raise
            time.sleep(seconds)
    return read()


def failed_read(error: Exception) -> OSError | None:
    """Return the file system error that prevented a read; None if a file is damaged or missing."""
    cause = error if isinstance(error, OSError) else error.__cause__
    missing = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
    return cause if isinstance(cause, OSError) and not isinstance(cause, missing) else None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
