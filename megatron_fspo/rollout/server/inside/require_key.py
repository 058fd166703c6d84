"""ASGI middleware that requires the key on every route of vLLM but ``GET /health``.

vLLM itself protects its generation routes only. Clients of its development routes, which weight updates use,
can run any code. ``--middleware`` adds this class; the middleware named last gets a request first.
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
    {"error": {"message": f"the key is missing or wrong: {KEY_VARIABLE} must be the same on both sides"}}
).encode()


class RequireKey:
    """Forwards a request to ``app`` if it has ``Authorization: Bearer KEY``; KEY is $VLLM_API_KEY.

    Otherwise answers an HTTP request with 401, and closes a WebSocket before accepting it. Raises
    ``InputError`` if the environment has no key, so that the server does not start.
    """

    def __init__(self, app: App) -> None:
        key = api_key()
        if key is None:
            raise InputError(f"{KEY_VARIABLE} is not set, but this server must require a key")
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
        # Digests have equal lengths, so the time of the comparison reveals nothing about the key.
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
