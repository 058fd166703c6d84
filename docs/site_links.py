"""A hook of mkdocs. Files outside of docs/ that pages link to are part of the site; the README is its start.

Formulas are MathML, made here: browsers draw it without scripts and fonts of ours.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from latex2mathml.converter import convert
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files, InclusionLevel

sys.path.insert(0, str(Path(__file__).parent))
from site_docstrings import as_markdown

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "repository"
"""Folder of the site that they are in."""
_RENAMED = {ROOT / "README.md": "index.md", ROOT / "docs/README.md": "pages.md"}
_TAGS = {
    "config/#optimizer": ["learning rate", "optimizer.lr"],
    "config/#checkpoint": ["checkpoint interval", "checkpoint.every"],
    "config/#rollout": ["temperature", "rollout.samples"],
    "config/#run": ["seed", "run.steps"],
    "running/#resuming": ["resume"],
    "metrics/#the-band": ["LRE"],
    "config/#log": ["wandb", "tensorboard", "log.wandb"],
}
"""Place of the site → what users type who look for it. The search puts these above titles."""
_FORMULA = re.compile(r"^```math\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
_TO_FOLDER = re.compile(r"(?<!!)\[([^\]]+)\]\((?!\w+:|#)([^)\s#]+)\)")


def on_config(config: Any) -> Any:
    """Without `mike`, which sets this variable, there is no list of versions to ask for."""
    if "MIKE_DOCS_VERSION" not in os.environ:
        del config.extra["version"]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add what is linked to, and what the pages among that link to."""
    files.remove(files.src_uris["README.md"])
    for path, uri in _RENAMED.items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    waiting = [Path(file.abs_src_path) for file in files if file.src_uri.endswith(".md")]
    while waiting:
        page = waiting.pop()
        for link in _LINK.finditer(page.read_text(encoding="utf-8")):
            target = _target(page, link[1])
            if target is None or target.is_relative_to(ROOT / "docs"):
                continue
            uri = _uri(target)
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
        here = PurePosixPath(page.file.src_uri).parent
        return "/".join([".."] * len(here.parts) + [_uri(target)]) + (found[2] or "")

    def text(found: re.Match[str]) -> str:
        return found[1] if (source.parent / found[2]).is_dir() and not _target(source, found[2]) else found[0]

    markdown = _LINK.sub(link, _TO_FOLDER.sub(text, as_markdown(markdown)))
    return _FORMULA.sub(lambda found: convert(found[1], display="block") + "\n", markdown)


@event_priority(-100)  # after the search has written its index
def on_post_build(config: Any) -> None:
    """Add the tags to the index of the search."""
    path = Path(config.site_dir) / "search/search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    places = {entry["location"]: entry for entry in index["docs"]}
    for place, tags in _TAGS.items():
        places[place]["tags"] = tags
    path.write_text(json.dumps(index, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")


def _uri(target: Path) -> str:
    """Of a file of the repository, in the site."""
    inside = target.is_relative_to(ROOT / "docs")
    uri = target.relative_to(ROOT / "docs") if inside else REPOSITORY / target.relative_to(ROOT)
    return _RENAMED.get(target, str(uri))


def _target(page: Path, link: str) -> Path | None:
    """The file that a page links to; of a folder its README."""
    target = (page.parent / link).resolve()
    target = target / "README.md" if target.is_dir() else target
    return target if target.is_file() and target.is_relative_to(ROOT) else None
