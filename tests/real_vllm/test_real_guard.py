"""The routes of a real vLLM, with the key and without. Needs VLLM_BIN."""

from __future__ import annotations

import re

import psutil
import pytest

from real_server import HTTP, bearer
from serving import Served

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


def ask(
    server: Served, method: str, path: str, headers: dict[str, str], body: str | None = "{}"
) -> tuple[int, str]:
    """Status and answer."""
    answer = HTTP.request(method, server.url + path, headers=headers, content=body)
    return answer.status_code, answer.text


def routes(server: Served) -> set[tuple[str, str]]:
    """Methods and paths, as the server itself lists them when it starts."""
    listed = re.findall(r"Route: (\S+), Methods: ([A-Z, ]+)", server.log.read_text(errors="replace"))
    return {
        (method, re.sub(r"{.*?}", "x", path)) for path, methods in listed for method in methods.split(", ")
    }


def test_no_route_but_health_answers_without_the_key(pair: list[Served], key: str) -> None:
    server = pair[0]
    wrong = [{}, *({"Authorization": f"Bearer {other}"} for other in ("another", key[:-1], key + "x"))]
    found = routes(server)
    assert {("POST", "/collective_rpc"), ("POST", "/update_weights"), ("GET", "/metrics")} <= found
    assert len(found) > 30
    open_to_all = {
        (method, path, status)
        for method, path in found | {("OPTIONS", "/collective_rpc"), ("GET", "/no/such/route")}
        for headers in wrong
        if (status := ask(server, method, path, headers)[0]) != 401
    }
    assert open_to_all == {("GET", "/health", 200)}
    for path in ("/v1/realtime", "/health"):
        assert ask(server, "GET", path, UPGRADE, None)[0] == 403, "a WebSocket"
    assert ask(server, "GET", "/is_paused", bearer()) == (200, '{"is_paused":false}')


def test_the_key_is_told_nowhere(pair: list[Served], key: str) -> None:
    """In answers, also to what is no request, the log, and the list of processes."""
    server = pair[0]
    said = [
        ask(server, method, path, bearer(), body)[1]
        for method, path in sorted(routes(server))
        if path in ("/server_info", "/openapi.json", "/metrics", "/version", "/v1/models", "/weight_info")
        or path in ("/update_weights", "/init_weight_transfer_engine", "/collective_rpc", "/tokenize")
        for body in ("{}", "[", '{"method": "no_such"}', '{"init_info": 3, "update_info": [1]}')
    ]
    assert len(said) > 30 and any("no_such" in answer for answer in said)
    server.until_healthy()
    shown = [str(one.cmdline()) for one in (psutil.Process(server.process.pid), *server.family)]
    assert any("RequireKey" in words for words in shown)
    assert key not in "".join([*said, *shown, server.log.read_text(errors="replace"), server.out.read_text()])
