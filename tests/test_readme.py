"""Links of all pages lead somewhere, and the index has every page. What is in fences: test_snippets.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch import REPO
from megatron_fspo.config import Config
from megatron_fspo.config.loading import legal_keys
from metrics_page import unknown
from snippets import PAGES


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
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


def test_the_index_has_every_page_once() -> None:
    text = (REPO / "docs/README.md").read_text(encoding="utf-8")
    pages = {path.name for path in REPO.glob("docs/*.md")} - {"README.md"}
    listed = re.findall(r"^- \[[^]]+\]\((\w+\.md)\)", text, flags=re.MULTILINE)
    assert sorted(listed) == sorted(pages)
    assert "(docs/README.md)" in (REPO / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_files_and_tests_that_are_named_are_there(page: Path) -> None:
    for path, test in re.findall(
        r"`((?:tests|benchmarks|docs|examples|megatron_fspo|tools)/[\w./*-]+|test_\w+\.py)(?:::(\w+))?`",
        page.read_text(encoding="utf-8"),
    ):
        files = list(REPO.glob(path.rstrip("/") if "/" in path else f"tests/**/{path}"))
        assert files, path
        assert not test or any(f"def {test}(" in file.read_text(encoding="utf-8") for file in files), test


def words(page: Path) -> int:
    """Outside of fences, tables included."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return sum(re.search(r"\w", word) is not None for word in text.split())


def test_the_pages_stay_short() -> None:
    readme, docs = REPO / "README.md", sorted(REPO.glob("docs/*.md"))
    assert len(readme.read_text(encoding="utf-8").splitlines()) <= 150
    assert sum(map(words, [readme, *docs])) <= 28_000


@pytest.mark.parametrize("page", [*REPO.glob("docs/*.md")], ids=lambda page: page.name)
def test_a_page_says_who_needs_it_and_what_is_next(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page.name != "README.md":
        assert re.search(r"^# .+\n\n(For anyone|Read this) ", text)
    if page.name != "api.md":
        assert "\n**Next**: " in text[-600:]


FILES = (".toml", ".sh", ".safetensors")
THEIRS = {"docs/coming_from.md", "docs/adapters.md"}
"""Pages that have keys and metrics of other trainers, too."""


def quoted(page: Path, pattern: str) -> list[str]:
    """Names of ours between backticks that match the pattern."""
    if str(page.relative_to(REPO)) in THEIRS:
        return []
    return re.findall(rf"`({pattern})(?![\w./<{{…*])", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_keys_and_metrics_that_are_named_are_legal(page: Path) -> None:
    legal = {key for key, _, _ in legal_keys()}
    sections = "|".join(Config.model_fields)
    keys = {key for key in quoted(page, rf"(?:{sections})\.\w+") if not key.endswith(FILES)}
    assert keys - legal == set()
    assert unknown(set(quoted(page, r"(?:fspo|actor|critic|perf|timing_s|training)/\w+"))) == []
