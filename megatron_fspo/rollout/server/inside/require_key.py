"""ASGI middleware that asks for the key on every route of vLLM but ``GET /health``.

vLLM's own guard looks at its generation routes only. Its development routes, through which weights are
updated, run any code that they are given. ``--middleware`` adds this class;
the middleware that is named last sees a request first.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from megatron_fspo.errors import InputError
from megatron_fspo.rollout.common import KEY_VARIABLE, api_key

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_REFUSAL = json.dumps(
    {"error": {"message": f"the key is missing or wrong: {KEY_VARIABLE} has to be the same on both sides"}}
).encode()


class RequireKey:
    """Passes a request on to ``app`` if it brings ``Authorization: Bearer KEY``; KEY is $VLLM_API_KEY.

    Without it an HTTP request is answered with 401, and a WebSocket is closed before it is accepted.

    Raises:
        InputError: the environment has no key; the server does not start.
    """

    def __init__(self, app: App) -> None:
        key = api_key()
        if key is None:
            raise InputError(f"{KEY_VARIABLE} is not set, and this server must not answer without a key")
        self._app = app
        self._digest = _digest(key.encode())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        asks = scope["type"], scope.get("method"), scope.get("path")
        if scope["type"] == "lifespan" or asks == ("http", "GET", "/health") or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": ""})
        else:
            await _refuse(send)

    def _has_key(self, scope: Message) -> bool:
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        # Digests have one length, so that the time of a comparison says nothing about the key.
        return bool(scheme.lower() == b"bearer" and hmac.compare_digest(_digest(key), self._digest))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


async def _refuse(send: Send) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(_REFUSAL)).encode()),
        (b"www-authenticate", b"Bearer"),
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": _REFUSAL})
