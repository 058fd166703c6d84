from __future__ import annotations

from pathlib import Path

import pytest
from weights_helpers import save_model, to_megatron


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 in ``hf``, the same converted in ``megatron``, and one with experts; nobody changes them.

    -0.0 is the first value of each tensor.
    """
    folder = tmp_path_factory.mktemp("sound")
    save_model(folder / "hf", "qwen3")
    save_model(folder / "experts", "qwen3_moe")
    to_megatron(folder / "hf", folder / "megatron")
    return folder
