from __future__ import annotations

import shutil
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {
        "torch built for CUDA": torch.version.cuda is None,
        "Transformer Engine": PathFinder.find_spec("transformer_engine") is None,
        "a C compiler": shutil.which("cc") is None,
    }
    what = next((name for name, is_missing in missing.items() if is_missing), None)
    if what is not None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=f"needs {what}: `make test-fake-gpu`"))
