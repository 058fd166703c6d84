from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # a warning at import is an error here

PEERS = ("trl", "verl", "tinker", "skyrl", "peft")
"""Tests of an adapter are in files that begin with its name, and need what it is an adapter for."""


class _Absent(pytest.Module):
    """A file of tests that cannot be imported here."""

    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip(f"needs {self.path.stem.split('_')[1]}: `make test-adapters`", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    peer = module_path.stem.split("_")[1]
    if peer in PEERS and importlib.util.find_spec(peer) is None:
        return _Absent.from_parent(parent, path=module_path)
    return None
