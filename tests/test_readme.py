"""The README's Python runs as it stands; links and commands of all pages name what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
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


PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted(REPO.glob("docs/*.md"))]
PAGES += sorted(REPO.glob("examples/*/README.md"))


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_links_and_targets_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)]+)\)", text):
        target, _, anchor = link.partition("#")
        if not link.startswith("https://"):
            place = page.parent / target if target else page
            assert place.exists(), link
            assert not anchor or anchor in anchors(place), link
    makefile = (REPO / "Makefile").read_text(encoding="utf-8")
    commands = re.findall(r"`make ([a-z0-9-]+)", text) + re.findall(r"^make ([a-z0-9-]+)", text, re.MULTILINE)
    for target in commands:
        assert f"\n{target}:" in makefile, target
