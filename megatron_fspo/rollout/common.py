"""Conventions of a trainer and its vLLM servers: names, the key, and the folder that tells where servers are.

The key comes from the environment on both sides: a command line and a configuration file are for others to
read. In the folder each server has a file with its URL, which is written under another name first, because
network file systems do not append atomically.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from megatron_fspo.errors import InputError

MODEL = "policy"
"""The name under which servers serve the policy (``--served-model-name``)."""
CHECKSUMS = "weight_checksums"
"""The method that our plugin adds to vLLM's workers."""
KEY_VARIABLE = "VLLM_API_KEY"
# A bearer token of RFC 6750. JSON and repr write none of its characters another way, so a search
# finds it, and it can be hidden, wherever a server repeats it.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")


def api_key() -> str | None:
    """The key in the environment; None where the variable is missing or empty.

    Raises:
        InputError: it is not a key; the message does not repeat it.
    """
    key = os.environ.get(KEY_VARIABLE) or None
    if key is not None:
        check_key(key)
    return key


def check_key(key: str) -> None:
    """Refuse what cannot be sent as a bearer token, as an InputError that does not repeat it."""
    if not _TOKEN.fullmatch(key):
        allowed = "letters, digits and any of - . _ ~ + / (`openssl rand -hex 32` makes one)"
        raise InputError(f"the API key in {KEY_VARIABLE} has to be {allowed}")


def announce(folder: Path, url: str) -> Path:
    """Say that a server is ready at ``url``; returns the file, which the server removes when it ends.

    Raises:
        InputError: the folder cannot be written.
    """
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
    """The URLs of the servers there, in the order of their names; none where there is no folder yet."""
    urls = []
    for file in sorted(folder.glob("*.url")):
        with suppress(FileNotFoundError):  # a server that ended meanwhile
            urls.append(file.read_text(encoding="utf-8").strip())
    return urls


def is_loopback(host: str) -> bool:
    """Return True if a name or address means this machine to itself only, as far as its writing tells."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return False
