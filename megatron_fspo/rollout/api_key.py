"""The key that a trainer and its vLLM servers share.

It comes from the environment on both sides: a command line and a configuration file are for others to read.
"""

from __future__ import annotations

import os
import re

from megatron_fspo.errors import InputError

VARIABLE = "VLLM_API_KEY"
# A bearer token of RFC 6750. JSON and repr write none of its characters another way, so it can be found and
# hidden wherever a server repeats it.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")


def api_key() -> str | None:
    """The key in the environment; None where the variable is missing or empty.

    Raises:
        InputError: it is not a key; the message does not repeat it.
    """
    key = os.environ.get(VARIABLE) or None
    if key is not None:
        check_key(key)
    return key


def check_key(key: str) -> None:
    """Refuse what cannot be sent as a bearer token.

    Raises:
        InputError: with a message that does not repeat the key.
    """
    if not _TOKEN.fullmatch(key):
        raise InputError(
            f"the API key in {VARIABLE} has to be letters, digits and any of - . _ ~ + / "
            "(`openssl rand -hex 32` makes one)"
        )
