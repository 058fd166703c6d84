from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

# How long an example takes says how loaded the machine is.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


def pytest_configure() -> None:
    # A shell that starts us in the background has SIGINT ignored, and all that we start would inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = {}
    if not torch.cuda.is_available():
        reasons["gpu"] = "needs a CUDA device; torch sees none here"
    if not os.environ.get("VLLM_BIN"):
        reasons["vllm"] = "needs a vLLM that VLLM_BIN names (`make vllm`)"
    # The longest first: a file that begins last would keep one core while the other has nothing left.
    items.sort(key=lambda item: [item.get_closest_marker(name) is None for name in ("vllm", "slow")])
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


PAIR = tuple(f"tests/real_vllm/test_real_{name}.py" for name in ("guard", "rollouts", "engine", "runs"))
"""Files that share two servers, so they must share a process."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return PAIR[0] if file in PAIR else file

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def random_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random little Qwen3 checkpoints, tied and untied; an odd vocabulary; head_dim ≠ hidden / heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folders = {}
    for name, tied in (("tied", True), ("untied", False)):
        torch.manual_seed(len(name))
        config = Qwen3Config(
            vocab_size=37,
            hidden_size=48,
            intermediate_size=112,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=20,
            rms_norm_eps=1e-6,
            tie_word_embeddings=tied,
            max_position_embeddings=128,
            initializer_range=0.15,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        )
        model = Qwen3ForCausalLM(config).float()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "norm" in key:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        folders[name] = tmp_path_factory.mktemp("checkpoints") / name
        model.save_pretrained(folders[name])
    return folders
