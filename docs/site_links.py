"""A hook of mkdocs: files of the repository outside of docs/ that pages link to are part of the site."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "repository"
"""Folder of the site that they are in."""
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
_TO_FOLDER = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:|#)([^)\s#]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add what is linked to, and what the pages among that link to."""
    waiting = [ROOT / "docs" / file.src_uri for file in files if file.src_uri.endswith(".md")]
    while waiting:
        page = waiting.pop()
        for link in _LINK.finditer(page.read_text(encoding="utf-8")):
            target = _target(page, link[1])
            if target is None or target.is_relative_to(ROOT / "docs"):
                continue
            uri = f"{REPOSITORY}/{target.relative_to(ROOT)}"
            if uri not in files.src_uris:
                file = File.generated(config, uri, abs_src_path=str(target))
                file.inclusion = InclusionLevel.NOT_IN_NAV
                files.append(file)
                if target.suffix == ".md":
                    waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are from where the page is in the site; without a link what is no file."""
    source = Path(page.file.abs_src_path)

    def link(found: re.Match[str]) -> str:
        target = _target(source, found[1])
        if target is None:
            return found[0]
        inside = target.is_relative_to(ROOT / "docs")
        uri = target.relative_to(ROOT / "docs") if inside else REPOSITORY / target.relative_to(ROOT)
        here = PurePosixPath(page.file.src_uri).parent
        return "/".join([".."] * len(here.parts) + [str(uri)]) + (found[2] or "")

    def text(found: re.Match[str]) -> str:
        return found[1] if (source.parent / found[2]).is_dir() and not _target(source, found[2]) else found[0]

    return _LINK.sub(link, _TO_FOLDER.sub(text, markdown))


def _target(page: Path, link: str) -> Path | None:
    """The file that a page links to; of a folder its README."""
    target = (page.parent / link).resolve()
    target = target / "README.md" if target.is_dir() else target
    return target if target.is_file() and target.is_relative_to(ROOT) else None
