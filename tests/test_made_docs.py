from __future__ import annotations

import importlib.util
import re
from xml.etree import ElementTree

import pytest

from launch import REPO

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
    spec = importlib.util.spec_from_file_location(script, REPO / f"docs/{script}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (REPO / "docs" / page).read_text(encoding="utf-8")
    assert text == module.render(), f"docs/{page} is stale: run `make docs`"


def test_the_gallery_has_its_pictures_and_they_are_small() -> None:
    named = re.findall(r"\]\((gallery/[\w-]+\.svg)\)", (REPO / "docs/gallery.md").read_text(encoding="utf-8"))
    assert sorted(named) == sorted(f"gallery/{path.name}" for path in REPO.glob("docs/gallery/*.svg"))
    for name in named:
        assert (REPO / "docs" / name).stat().st_size < 100_000
        assert ElementTree.parse(REPO / "docs" / name).getroot().tag.endswith("svg")
