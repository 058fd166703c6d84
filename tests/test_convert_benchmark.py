"""What docs/performance.md says of conversion; the benchmark itself, on a model that fits a test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import convert
from launch import REPO


def test_the_page_shows_what_was_measured() -> None:
    report = json.loads((REPO / "benchmarks/results/convert.json").read_text(encoding="utf-8"))
    page = (REPO / "docs/performance.md").read_text(encoding="utf-8")
    assert report["model"] == "qwen3-8b" and convert.table(report) in page
    assert report["command"] in page
    for step in ("to Megatron", "to Hugging Face"):
        assert report["steps"][step]["time"] <= 2.5
        assert report["steps"][step]["peak_mib"] <= 3 * 1024


@pytest.mark.slow
def test_memory_is_that_of_blocks_not_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        convert.MODELS,
        "small",
        convert.MODELS["qwen3-0.6b"] | {"num_hidden_layers": 8, "tie_word_embeddings": False},
    )
    report = convert.measure(tmp_path, "small")
    assert report["bytes"] > 850e6
    base = report["steps"]["copy"]["peak_mib"]
    for step in ("to Megatron", "to Hugging Face", "compare"):
        assert report["steps"][step]["peak_mib"] < base + 1000, step
