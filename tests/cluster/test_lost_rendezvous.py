"""Node 0 vanishes while nodes meet: the others say so and end, so that a scheduler starts them again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import REPO, environment
from nodes import Nodes, environment_of_a_node, why_not

pytestmark = pytest.mark.slow
SETTINGS = "--smoke --parallel.tensor 1 --parallel.sequence false --resume auto --rollout.prompts 12".split()
UNTIL_REACHED = """
import socket, time
while socket.socket().connect_ex(("node-a", 29500)):
    time.sleep(0.2)
"""


def test_node_0_gone_while_nodes_meet(tmp_path: Path) -> None:
    """Two of three nodes are there, so that they wait for the third."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Nodes(["node-a", "node-b"], tmp_path / "hosts") as nodes:
        env = environment_of_a_node(environment()) | {
            **{"NNODES": "3", "NPROC": "1", "MASTER_ADDR": "node-a", "MAX_RESTARTS": "1"},
            **{"PYTHON": sys.executable, "RENDEZVOUS_SECONDS": "5"},
        }
        words = ["bash", str(REPO / "examples/run_fspo_qwen3_8b.sh"), *SETTINGS]
        words += ["--run.folder", str(tmp_path / "runs")]
        agents = []
        try:
            for rank, name in enumerate(("node-a", "node-b")):
                with (tmp_path / name).open("w") as log:
                    given = env | {"NODE_RANK": str(rank)}
                    agents.append(nodes.start(name, words, env=given, stdout=log, stderr=subprocess.STDOUT))
            assert nodes.start("node-b", [sys.executable, "-c", UNTIL_REACHED], env=env).wait(120) == 0
            time.sleep(10)  # node-b meets node 0, and waits
            said = tmp_path / "node-b"
            assert [agent.poll() for agent in agents] == [None, None], said.read_text()
            assert nodes.listening("node-a") == {nodes.address("node-a")} and not nodes.listening("node-b")
            nodes.cut("node-a")
            assert agents[1].wait(60) != 0
            assert "node 1: node 0 at node-a:29500 has not answered for" in said.read_text()
        finally:
            for agent in agents:
                if agent.poll() is None:
                    os.killpg(agent.pid, 9)
                agent.wait()
