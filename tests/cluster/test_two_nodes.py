"""The launch script on two nodes with their own addresses and names, a vLLM server on a third."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from math import nan
from pathlib import Path

import pytest
from safetensors.torch import load_file

from launch import REPO, environment, why
from nodes import Nodes, environment_of_a_node, why_not
from runs import numbers, rows
from serving_node import serving_on, wide_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.long]

SERVER = "vllm-0"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide_checkpoint(tmp_path_factory.mktemp("make-sum"))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Nodes(["node-a", "node-b", SERVER], tmp_path_factory.mktemp("nodes") / "hosts") as found:
        yield found


@pytest.fixture(scope="module")
def server(nodes: Nodes, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with serving_on(nodes, SERVER, checkpoint, tmp_path_factory.mktemp("server")) as folder:
        yield folder


def smoke(folder: Path, name: str, checkpoint: Path, servers: Path) -> list[str]:
    """The script's line; it is the same on every node."""
    place = ["--run.folder", str(folder), "--run.name", name, "--model.checkpoint", str(checkpoint)]
    # vLLM's threads spin: on two cores a rank was seen to get no time for 40 s.
    rollout = ["--rollout.engine", "vllm", "--vllm.discovery", str(servers)]
    rollout += ["--parallel.silence_seconds", "300"]
    # Hardly any answer is right: a reward that differs between responses, in a module of the user's.
    rollout += ["--reward.name", "own_rewards:length"]
    return ["bash", str(REPO / "examples/run_fspo_qwen3_8b.sh"), "--smoke", *place, *rollout]


def finish(processes: Sequence[subprocess.Popen[str]]) -> str:
    """Wait for all; what they wrote to standard error."""
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(map(why, said))
    return "\n".join(said)


def test_two_nodes_have_the_numbers_of_one(
    nodes: Nodes, server: Path, checkpoint: Path, tmp_path: Path
) -> None:
    env = environment_of_a_node(environment(PYTHON=sys.executable))
    env["PYTHONPATH"] += f":{REPO / 'tests/rewards'}"

    def start(name: str, node: str, **given: str) -> subprocess.Popen[str]:
        words = smoke(tmp_path, name, checkpoint, server)
        folder = tmp_path / node  # whatever a node reads or writes is not where it was started
        folder.mkdir(exist_ok=True)
        pipe = subprocess.PIPE
        return nodes.start(node, words, env=env | given, cwd=folder, stdout=pipe, stderr=pipe)

    finish([start("one", "node-a", NPROC="4")])
    both = {"NNODES": "2", "MASTER_ADDR": nodes.address("node-a")}
    agents = [start("two", name, NODE_RANK=str(i), **both) for i, name in enumerate(["node-a", "node-b"])]
    listening: dict[str, set[str]] = {"node-a": set(), "node-b": set()}
    end = time.monotonic() + 300
    while any(agent.poll() is None for agent in agents) and time.monotonic() < end:
        for name, addresses in listening.items():
            addresses |= nodes.listening(name)
        time.sleep(0.5)
    finish(agents)
    assert listening == {name: {nodes.address(name)} for name in listening}, "gloo's listeners too"

    one, two = rows(tmp_path, "one"), rows(tmp_path, "two")
    assert [row["step"] for row in one] == [0, 1, 2]
    assert all(row["actor/grad_norm"] > 0 for row in one[1:])
    for want, got in zip(one, two, strict=True):
        # What a step has no value for, such as the clip rate of a length bin without responses, is null.
        want, got = (
            {name: nan if value is None else value for name, value in numbers(row).items()}
            for row in (want, got)
        )
        assert got == pytest.approx(want, rel=1e-3, abs=1e-4, nan_ok=True)
    want, got = (load_file(tmp_path / name / "hf/model.safetensors") for name in ("one", "two"))
    assert set(want) == set(got) and all((want[key] - got[key]).abs().max() < 1e-5 for key in want)
