"""examples/kubernetes: what its parts say of each other, and the schema of Kubernetes where that is there."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launch import REPO
from megatron_fspo.config import Config
from megatron_fspo.config.loading import load_config

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
FILE = REPO / "examples/kubernetes/job.yaml"
PARTS: dict[tuple[str, str], dict[str, Any]] = {
    (part["kind"], part["metadata"]["name"]): part for part in yaml.safe_load_all(FILE.read_text("utf-8"))
}
JOB, SERVERS = PARTS["Job", "fspo-trainer"]["spec"], PARTS["StatefulSet", "vllm"]["spec"]
POD = JOB["template"]["spec"]
(TRAINER,) = POD["containers"]
ENV = {one["name"]: one.get("value") for one in TRAINER["env"]}


@pytest.mark.parametrize("part", PARTS, ids=" ".join)
def test_the_schema_of_kubernetes(part: tuple[str, str]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    validate.validate(PARTS[part], validate.latest_version(), strict=True)


def test_with_rdma() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    words = ["kubectl", "kustomize", str(FILE.parent)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    parts = {(part["kind"], part["metadata"]["name"]): part for part in yaml.safe_load_all(done.stdout)}
    assert parts.keys() == PARTS.keys()
    for key, cards in ((("Job", "fspo-trainer"), 8), (("StatefulSet", "vllm"), 1)):
        template = parts[key]["spec"]["template"]
        (container,) = template["spec"]["containers"]
        assert container.pop("securityContext") == {"capabilities": {"add": ["IPC_LOCK"]}}
        assert container["resources"]["limits"].pop("rdma/hca") == cards
        assert template["metadata"].pop("annotations") == {"k8s.v1.cni.cncf.io/networks": "rdma"}
    assert parts == PARTS, "and nothing else"


@pytest.mark.parametrize("which", [("fspo-trainer", JOB), ("vllm", SERVERS)], ids=["trainer", "servers"])
def test_pods_have_the_names_that_others_ask_for(which: tuple[str, dict[str, Any]]) -> None:
    name, spec = which
    service = PARTS["Service", name]["spec"]
    assert service["clusterIP"] == "None" and service["selector"] == spec["template"]["metadata"]["labels"]
    assert name == (spec["serviceName"] if name == "vllm" else spec["template"]["spec"]["subdomain"])


def test_the_pods_are_the_nodes_of_one_job() -> None:
    assert JOB["completionMode"] == "Indexed" and str(JOB["completions"]) == ENV["NNODES"]
    assert JOB["parallelism"] == JOB["completions"], "all nodes at once"
    assert ENV["MASTER_ADDR"] == "fspo-trainer-0.fspo-trainer"
    assert TRAINER["resources"]["limits"]["nvidia.com/gpu"] == int(ENV["NPROC"])
    assert POD["terminationGracePeriodSeconds"] > int(ENV["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]), "time to save"


def test_bad_input_fails_the_job_at_once() -> None:
    """Exit status 2 of the check in the launch script; anything else is tried again."""
    rules = [rule for rule in JOB["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
    codes = {"containerName": TRAINER["name"], "operator": "In", "values": [2]}
    assert rules == [{"action": "FailJob", "onExitCodes": codes}]


def command(tmp_path: Path) -> list[str]:
    """The words that the trainer's shell gives the launch script."""
    bash = tmp_path / "bash"
    bash.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    bash.chmod(0o755)
    words = ["/bin/bash", *TRAINER["command"][1:], *TRAINER["args"]]
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SERVERS": ENV["SERVERS"] or ""}
    return subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_command_is_a_legal_run(tmp_path: Path) -> None:
    script, *words = command(tmp_path)
    assert script == "examples/run_fspo_qwen3_8b.sh"
    _, *rest = runpy.run_path(str(REPO / script))["arguments"](words)
    files = [Path(rest[at + 1]) for at, word in enumerate(rest) if word == "--config"]
    at = rest.index("--resume")
    assert rest[at + 1] == "auto"
    kept = [word for n, word in enumerate(rest) if n not in (at, at + 1) and word != "--config"]
    overrides = [word for word in kept if Path(word) not in files]
    config: Config = load_config([REPO / file for file in files], overrides)
    assert config.rollout.engine == "vllm" and len(config.data.validation_sets) == 4
    assert config.vllm.urls == tuple(f"http://vllm-{n}.vllm:8000" for n in range(SERVERS["replicas"]))
    serve = SERVERS["template"]["spec"]["containers"][0]["args"]
    assert serve[serve.index("--backend") + 1] == config.vllm.transfer
    assert serve[serve.index("--model") + 1] == str(config.model.checkpoint)
    assert (JOB["completions"] * int(ENV["NPROC"] or 0)) % config.parallel.model_size == 0
