"""Conventions shared by the trainer and its vLLM servers: names, the API key, and the folder of server URLs.

Both sides read the key from the environment, as others can read command lines and configuration files. In
the folder each server has a file with its URL, since network file systems do not append atomically. Files
are renamed into place, so a reader never sees half of one.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from megatron_fspo.errors import InputError

MODEL = "policy"
"""The policy's model name in requests to servers."""
CHECKSUMS = "weight_checksums"
"""The method that our worker extension adds to vLLM's workers."""
COLOCATED_SHARE = 0.8
"""Share of a GPU for vLLM beside a trainer, which keeps CUDA and its communicators there."""
KEY_VARIABLE = "VLLM_API_KEY"
# A bearer token of RFC 6750. JSON and repr escape none of its characters, so a plain text search can mask the
# key wherever a server echoes it.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")


def api_key() -> str | None:
    """Return the key from the environment; None if the variable is missing or empty. Raises ``InputError``,
    without the value in its message, if it is not a valid key."""
    key = os.environ.get(KEY_VARIABLE) or None
    if key is not None:
        check_key(key)
    return key


def check_key(key: str) -> None:
    """Raise ``InputError``, without the key in its message, unless ``key`` is a valid bearer token."""
    if not _TOKEN.fullmatch(key):
        allowed = "letters, digits and - . _ ~ + / (`openssl rand -hex 32` makes a key)"
        raise InputError(f"the API key in {KEY_VARIABLE} may contain only {allowed}")


def announce(folder: Path, url: str) -> Path:
    """Write a file that says a server is ready at ``url``; return its path, which the caller deletes when the
    server ends. Raises ``InputError`` if the file cannot be written."""
    file = folder / f"{url.split('//')[-1].replace(':', '-')}.url"
    partial = file.with_suffix(".partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(f"{url}\n", encoding="utf-8")
        partial.rename(file)
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror}") from None
    return file


def announced(folder: Path) -> list[str]:
    """Return the URLs announced in ``folder``, in the order of file names; [] if there is no folder yet."""
    urls = []
    for file in sorted(folder.glob("*.url")):
        with suppress(FileNotFoundError):  # the server ended meanwhile
            urls.append(file.read_text(encoding="utf-8").strip())
    return urls


def is_loopback(host: str) -> bool:
    """Return True if ``host`` is localhost or a loopback address. Names are not resolved."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a host name
        return False
