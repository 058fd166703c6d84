"""examples/qwen3_30b_a3b: its configurations over those of the 8B model."""

from __future__ import annotations

import pytest

from launch import REPO
from megatron_fspo.config.loading import load_config

EXAMPLES = REPO / "examples"
METHOD = ("data", "reward", "loss", "optimizer", "evaluation", "correction")


@pytest.mark.parametrize("layout", ["one_node", "two_nodes", "four_nodes"])
def test_a_layout_changes_no_method(layout: str) -> None:
    base = EXAMPLES / "qwen3_8b/run.toml"
    ours = EXAMPLES / "qwen3_30b_a3b"
    config, other = load_config([base, ours / "run.toml", ours / f"{layout}.toml"]), load_config([base])
    assert all(getattr(config, section) == getattr(other, section) for section in METHOD)
    assert config.run.folder != other.run.folder
    assert config.moe.replay == "old_pass"
    assert config.parallel.expert == 8 == config.parallel.model_size * 2, "experts stay inside a node"
    assert config.vllm.colocated == (layout == "one_node")
