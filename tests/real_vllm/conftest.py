from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from real_server import random_like
from serving import Served, serving
from serving_node import wide_checkpoint

KEY = "a-secret-of-32-letters-and-digits"


@pytest.fixture(scope="package", autouse=True)
def key() -> Iterator[str]:
    """All servers ask for it: on every route of theirs that a test or a run uses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", KEY)
        yield KEY


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide_checkpoint(tmp_path_factory.mktemp("make-sum"))


@pytest.fixture(scope="package")
def checkpoints(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two of random weights."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return [random_like(checkpoint, folder / str(seed), seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="package")
def both(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Served]]:
    flags = ("--dtype", "float32", "--", "--max-model-len", "128", "--max-num-seqs", "16")
    # What an update met is read again: more at once than fits, which kills a vLLM that reads in parts.
    flags += ("--max-num-batched-tokens", "160")
    with serving(checkpoint, tmp_path_factory.mktemp("servers"), *flags, count=2) as servers:
        yield servers


@pytest.fixture
def pair(both: list[Served]) -> list[Served]:
    """Two servers of the checkpoint, by gloo, ready. A test brings weights of its own, and may kill them."""
    for server in both:
        server.until_healthy()
    return both


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
