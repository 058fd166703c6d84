"""Servers of their own: of two workers, and of a plugin that leaves a copy of a weight behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from real_server import FAR, FLAGS, TOLERANCE, random_like, send, weights
from serving import serving, without_repack

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.long]


def test_two_workers_in_one_server(checkpoint: Path, tmp_path: Path) -> None:
    """Tensor parallel: each has its shards, and checksums add up to the whole."""
    old, new = (
        random_like(checkpoint, tmp_path / str(seed), seed=seed, tie_word_embeddings=False) for seed in (0, 1)
    )
    with serving(old, tmp_path, "--dtype", "float32", "--", *FLAGS, "--tensor-parallel-size", "2") as (
        server,
    ):
        routes = server.routes
        assert routes.distance(old) < TOLERANCE
        assert send(server.url, weights(new).items(), 1) is None
        assert routes.distance(new) < TOLERANCE < FAR < routes.distance(old)
        assert routes.proof(new)[0] is True
        assert routes.proof(old)[0] is False


def test_a_head_that_stays_behind_is_noticed(
    checkpoint: Path, checkpoints: list[Path], tmp_path: Path
) -> None:
    """vLLM on a CPU packs the head of a tied model once and for all, were it not for our plugin."""
    flags = ("--vllm", without_repack(tmp_path), "--dtype", "float32")
    with serving(checkpoint, tmp_path, *flags) as (server,):
        assert send(server.url, weights(checkpoints[1]).items(), 1) is None
        same, text = server.routes.proof(checkpoints[1])
    assert same is False
    first, line, *_ = text.splitlines()
    assert first.startswith("1 of ") and line.startswith("  model.embed_tokens.weight (packed): ")
