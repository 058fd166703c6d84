"""The README's Python runs as it stands, and its commands name what is there."""

from __future__ import annotations

import re

import torch

from launch import REPO

TEXT = (REPO / "README.md").read_text(encoding="utf-8")


def test_the_library_example_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    generator = torch.Generator().manual_seed(1)
    sums = torch.randn(8, generator=generator) * 0.1
    log_probs = torch.zeros(8, requires_grad=True)
    names = {
        "rewards": torch.rand(2, 4, generator=generator),
        "log_ratio_sum": sums,
        "lengths": torch.arange(1, 9),
        "sequence_log_probs": log_probs,
        "N": 8,
    }
    exec(block, names)
    names["loss"].backward()
    assert torch.equal(log_probs.grad, -names["surrogate"].weight / 8)


def test_links_and_targets_are_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert target.startswith("https://") or (REPO / target).exists(), target
    makefile = (REPO / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`?make ([a-z0-9-]+)", TEXT):
        assert f"\n{target}:" in makefile, target
