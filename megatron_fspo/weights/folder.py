"""A checkpoint folder that appears whole or not at all; the files that belong beside its weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from megatron_fspo.errors import InputError

# Weights in other formats and code stay behind.
_SIDE_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip


@contextmanager
def new_checkpoint(out_dir: str | Path, source_dir: Path, needed_bytes: int) -> Iterator[Path]:
    """A folder to write a checkpoint in, which becomes ``out_dir`` when the block ends without an error.

    An earlier checkpoint there is replaced at that moment; until then, and after any error, ``out_dir`` is as
    it was. What a killed run left is removed by the next.

    Raises:
        InputError: ``out_dir`` is something else, or holds ``source_dir``; or the disk is too full.
    """
    out, source = Path(out_dir).resolve(), source_dir.resolve()
    if out.exists() and not (out.is_dir() and ((out / "config.json").is_file() or not any(out.iterdir()))):
        raise InputError(f"{out} exists and is not a checkpoint folder; it will not be replaced")
    if source.is_relative_to(out):
        raise InputError(f"{out} holds the source checkpoint {source}; write somewhere else")
    partial = out.with_name(f".{out.name}.partial")
    if not out.exists() and (old := _old(out)).exists():  # killed between the two renames of _replace
        old.rename(out)
    if partial.exists():  # of a run that was killed
        shutil.rmtree(partial)
    created = [parent for parent in out.parents if not parent.exists()]
    try:
        partial.mkdir(parents=True)
        free = shutil.disk_usage(partial).free
        if free < needed_bytes:
            raise InputError(f"{out.parent} has {free:,} bytes free; the checkpoint needs {needed_bytes:,}")
        yield partial
        _replace(out, partial)
    except OSError as error:
        raise InputError(f"{error.filename or out}: {error.strerror or error}; nothing written") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # renamed away, unless something failed
        for parent in created:
            with suppress(OSError):  # not empty: the checkpoint is in it
                parent.rmdir()


def copy_side_files(source: Path, folder: Path, dtype: torch.dtype | None) -> None:
    """Config and tokenizer. The config says ``dtype``, if given, and is that of a float checkpoint."""
    for file in _SIDE_FILES:
        if (source / file).is_file():
            shutil.copyfile(source / file, folder / file)
    config = json.loads((source / "config.json").read_bytes())
    changed = dict(config)
    changed.pop("quantization_config", None)
    if dtype is not None:
        for key in {"dtype", "torch_dtype"} & config.keys():
            changed[key] = str(dtype).removeprefix("torch.")
    if changed != config:
        text = json.dumps(changed, indent=2, ensure_ascii=False) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")


def _old(out: Path) -> Path:
    """Where the earlier checkpoint waits while the new one takes its place."""
    return out.with_name(f".{out.name}.old")


def _replace(out: Path, partial: Path) -> None:
    """Put ``partial`` in the place of ``out``; a folder there stays whole beside it until that is done."""
    if not out.exists():
        partial.rename(out)
        return
    old = _old(out)
    if old.exists():  # of a run that was killed after this function put the new one in place
        shutil.rmtree(old)
    out.rename(old)
    try:
        partial.rename(out)
    except BaseException:
        old.rename(out)
        raise
    shutil.rmtree(old)
