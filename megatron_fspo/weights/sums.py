"""``SHA256SUMS`` of a checkpoint's folder: of each file its hash, as ``sha256sum -c`` reads them.

The last line, a comment to that program, is the hash of those before it: so no byte of the list itself can
change unseen.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from megatron_fspo.errors import InputError

T = TypeVar("T")

SUMS = "SHA256SUMS"
_TRANSIENT = {errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EREMOTEIO}
_PAUSES = (0.5, 1.0, 2.0, 4.0)
"""Seconds before each further attempt to read."""


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(*paths: Path) -> None:
    """Return when files are on the disk, and the names in folders."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems cannot do it with folders.
            if error.errno != errno.EINVAL or not path.is_dir():
                raise
        finally:
            os.close(descriptor)


def write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Write the list.

    Args:
        sums: path of a file from the folder → its SHA-256.
    """
    text = "".join(f"{found}  {name}\n" for name, found in sorted(sums.items()))
    (folder / SUMS).write_text(f"{text}# {_of(text)}\n", encoding="utf-8")


def read_sums(folder: Path) -> dict[str, str]:
    """Path of a file from the folder → its SHA-256.

    Raises:
        InputError: the list is missing or damaged; from an ``OSError`` if it cannot be read.
    """
    path = folder / SUMS
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    text, _, last = raw.decode("utf-8", errors="replace").removesuffix("\n").rpartition("\n")
    if not raw.endswith(b"\n") or last != f"# {_of(text + chr(10))}":
        raise InputError(f"{path} is damaged: its last line is not the SHA-256 of those before it")
    pairs = (line.split("  ", 1) for line in text.split("\n"))
    return {name: found for found, name in pairs}


def check_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """``InputError`` for the first file that is missing, or not what was written; from an ``OSError`` for one
    that cannot be read."""
    for name, wanted in sums.items():
        path = folder / name
        try:
            found = digest(path)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from error
        if found != wanted:
            raise InputError(f"{path} is damaged: its SHA-256 is not that of {SUMS}")


def patiently(read: Callable[[], T]) -> T:
    """What ``read`` returns; it is asked again after an error of the file system that may pass."""
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
    """Why the file system gave nothing; None if it gave what is damaged, or a file is missing."""
    cause = error if isinstance(error, OSError) else error.__cause__
    missing = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
    return cause if isinstance(cause, OSError) and not isinstance(cause, missing) else None


def _of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
