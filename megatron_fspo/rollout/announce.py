"""Where vLLM servers are: a folder that they and the trainer share, in which each has a file with its URL.

A file per server, written under another name first, because network file systems do not append atomically.
"""

from __future__ import annotations

from pathlib import Path

from megatron_fspo.errors import InputError

_SUFFIX = ".url"


def announce(folder: Path, url: str) -> Path:
    """Say that a server is ready at ``url``; returns the file, which the server removes when it ends.

    Raises:
        InputError: the folder cannot be written.
    """
    file = folder / f"{url.split('//')[-1].replace(':', '-')}{_SUFFIX}"
    partial = file.with_suffix(".partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(f"{url}\n", encoding="utf-8")
        partial.rename(file)
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror}") from None
    return file


def announced(folder: Path) -> list[str]:
    """The URLs of the servers there, in the order of their names; none where there is no folder yet.

    A server that ends meanwhile is left out.
    """
    found = []
    for file in sorted(folder.glob(f"*{_SUFFIX}")):
        try:
            found.append(file.read_text(encoding="utf-8").strip())
        except FileNotFoundError:
            continue
    return found
