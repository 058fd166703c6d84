from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType
from xml.etree import ElementTree

import pytest

from launch import REPO
from megatron_fspo.config.loading import load_config

PAGE = REPO / "docs/config.md"


@pytest.mark.parametrize(
    ("script", "page"),
    [
        ("make_config", "config.md"),
        ("make_parallelism", "parallelism.svg"),
        ("make_faults", "faults.md"),
        ("make_plan", "plan.md"),
        ("make_gallery", "gallery.md"),
        ("make_evidence", "evidence.md"),
    ],
)
def test_a_page_made_from_code_is_what_the_code_says(script: str, page: str) -> None:
    text = (REPO / "docs" / page).read_text(encoding="utf-8")
    assert text == made_by(script).render(), f"docs/{page} is stale: run `make docs`"


def test_planned_steps_are_as_long_as_published_ones() -> None:
    for step in made_by("make_plan").PUBLISHED:
        assert 0.85 < step.plan().seconds / step.seconds < 1.15, step


def test_a_page_that_lost_an_asterisk_is_found() -> None:
    lost = made_by("site_check").lost
    source = "**w** = √(L + L²/L*), *far* below L\\*, `x*y` and [c·√L](a_b.md)"
    page = "<p><b>w</b> = √(L + L²/L{0}), <i>far</i> below L{1}, <code>x*y</code> and <a>c·√L</a></p>"
    assert lost(source, page.format("*", "*")) == []
    assert lost(source, page.format("<em>", "</em>")) == ["L*,", "L²/L*),"]
    assert lost(source, "") == ["L*,", "L²/L*),", "c·√L", "√(L"]


def made_by(script: str) -> ModuleType:
    """The module of docs/."""
    spec = importlib.util.spec_from_file_location(script, REPO / f"docs/{script}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[script] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_the_gallery_has_its_pictures_and_they_are_small() -> None:
    load_config(REPO / "docs/gallery/run/config.toml")  # the run can be drawn again
    named = re.findall(r"\]\((gallery/[\w-]+\.svg)\)", (REPO / "docs/gallery.md").read_text(encoding="utf-8"))
    assert sorted(named) == sorted(f"gallery/{path.name}" for path in REPO.glob("docs/gallery/*.svg"))
    for name in named:
        assert (REPO / "docs" / name).stat().st_size < 100_000
        assert ElementTree.parse(REPO / "docs" / name).getroot().tag.endswith("svg")
