from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

import tiny_families
from cores import summed_up

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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """For ``.ci/run``, whose last line is pytest's own. Figures that cannot be made fail nothing."""
    if file := os.environ.get("CI_CORES"):
        try:
            terminalreporter.write_line(f".ci/run: {summed_up(Path(file).read_text())}")
        except Exception as error:
            terminalreporter.write_line(f".ci/run: no figures of the cores: {error!r}")


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


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A job of this process alone, as ``dist.group.WORLD``."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


_SIZES = {
    "vocab_size": 37, "hidden_size": 48, "intermediate_size": 112, "num_attention_heads": 4, "head_dim": 20,
    "num_key_value_heads": 2, "moe_intermediate_size": 24, "max_position_embeddings": 128,
}  # fmt: skip


def _write(folder: Path, seed: int, family: str, **more: Any) -> Path:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = tiny_families.config(family, _SIZES, initializer_range=0.15, **more)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def random_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random little Qwen3 checkpoints, tied and untied; an odd vocabulary; head_dim ≠ hidden / heads."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        name: _write(folder / name, len(name), "qwen3", tie_word_embeddings=tied)
        for name, tied in (("tied", True), ("untied", False))
    }


@pytest.fixture(scope="session")
def moe_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same of Qwen3-MoE: weights of a token's experts normalised, and, with a tied head, not."""
    folder = tmp_path_factory.mktemp("experts")
    return {
        name: _write(folder / name, 1, family)
        for name, family in (("moe", "qwen3_moe"), ("moe_raw", "moe_raw"))
    }
