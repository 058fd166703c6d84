"""The nodes that jobs are tried on are apart from each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nodes import Nodes, why_not

LISTEN = """
import socket
with socket.create_server(("0.0.0.0", 5000)) as server:
    print("ready", flush=True)
    while True:
        with server.accept()[0] as guest:
            guest.sendall(socket.gethostname().encode())
"""
ASK = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], 5000), timeout=0.5) as server:
        print(server.recv(99).decode())
except OSError:
    print("nobody")
"""


def ask(nodes: Nodes, node: str, host: str) -> str:
    """Who answers on ``host`` to a process on ``node``."""
    process = nodes.start(node, [sys.executable, "-c", ASK, host], stdout=subprocess.PIPE)
    return process.communicate(timeout=60)[0].strip()


def test_nodes_have_names_addresses_and_a_cable(tmp_path: Path) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Nodes(["one", "two"], tmp_path / "hosts") as nodes:
        server = nodes.start("two", [sys.executable, "-c", LISTEN], stdout=subprocess.PIPE)
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        found = {
            (node, host): ask(nodes, node, host) for node in ("one", "two") for host in ("two", "127.0.0.1")
        }
        assert found == {
            ("one", "two"): "two",
            ("one", "127.0.0.1"): "nobody",
            ("two", "two"): "two",
            ("two", "127.0.0.1"): "two",
        }
        assert ask(nodes, "one", nodes.address("two")) == "two"
        nodes.cut("two")
        assert ask(nodes, "one", "two") == "nobody"
        nodes.mend("two")
        assert ask(nodes, "one", "two") == "two"
    assert server.wait(10) != 0 and server.stdout.close() is None
    assert nodes._bridge not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
