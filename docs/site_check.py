"""Checks of the built site: pages say what their sources say, every page is near the first one, and a search
answers what users ask.

python docs/site_check.py build/site
"""

from __future__ import annotations

import html
import json
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ("objective", "losses", "plugin", "types", "weights")
"""What the page of the library has of the package."""
CLICKS = 3
RESULTS = 3
"""Of a search, that a reader looks at."""
QUESTIONS = {
    "choose c width of the band": "choosing_c/",
    "out of memory": "symptoms/#out-of-memory-oom",
    "OOM": "symptoms/#out-of-memory-oom",
    "resume after kill": "running/",
    "write my own reward function": "rewards/",
    "use FSPO in TRL": "adapters/",
    "canary failed": "symptoms/",
    "train with LoRA": "lora/",
    "convert checkpoint to Hugging Face": "checkpoints/",
    "what does LRE mean": "metrics/",
    "tested on GPU": "how_it_works/",
    "deepseek": "models/",
    "job hangs": "symptoms/#a-rank-is-silent-or-the-job-hangs",
    "NaN loss": "symptoms/#nan-or-",
    "multi node": "cluster/",
    "slurm": "repository/examples/slurm/",
}
"""What a user types → the page, or the place in it, that answers."""
FIRST = {
    "learning rate": "config/#optimizer",
    "optimizer.lr": "config/#optimizer",
    "checkpoint interval": "config/#checkpoint",
    "temperature": "config/#rollout",
    "wandb": "config/#log",
}
"""The same, where the key comes before all else."""
_FORMULA = re.compile(r"[*^√Σσ²·≤≥≠½π]|\w_\w")
"""What makes a word one that Markdown might change, or a reader must find as it was written."""


def main() -> int:
    """Print what fails; the exit status is 1 if anything does."""
    site = Path(sys.argv[1])
    pages = {path.parent.relative_to(site) for path in site.rglob("index.html")}
    problems = [*unlike_their_sources(site)]
    distance = clicks(site)
    problems += [f"{page}: not within {CLICKS} clicks" for page in pages if distance.get(page, 9) > CLICKS]
    for question, place in (QUESTIONS | FIRST).items():
        found = search(site, question)[: 1 if question in FIRST else RESULTS]
        if not any(one.startswith(place) for one in found):
            problems.append(f"'{question}' gives {', '.join(found)}, not {place}")
    asked = len(QUESTIONS | FIRST)
    print("\n".join(problems) or f"{len(pages)} pages, {asked} questions: as they should be")
    return bool(problems)


def unlike_their_sources(site: Path) -> Iterator[str]:
    """What the pages and docstrings have, and the site has not, or has as it is in the source only."""
    sources = {path: path.stem for path in ROOT.glob("docs/*.md")}
    sources |= {ROOT / "README.md": ".", ROOT / "docs/README.md": "pages"}
    for source, folder in sources.items():
        page = (site / folder / "index.html").read_text(encoding="utf-8")
        text = source.read_text(encoding="utf-8")
        yield from (f"{folder}: {word} is not on the page" for word in lost(text, page))
        if page.count("<math ") != text.count("\n```math\n"):
            yield f"{folder}: not every formula is drawn"
        title = re.search(r'md-nav__link--active">\s*<span class="md-ellipsis">\s*(.*?)\s*<', page)
        if title is not None and title[1] != plain(re.findall(r"<h1.*?</h1>", page, re.DOTALL)[0]).strip(
            "¶ "
        ):
            yield f"{folder}: its title in the navigation is {title[1]}"
    page = (site / "api/index.html").read_text(encoding="utf-8")
    yield from (f"api: {word} is not on the page" for text in docstrings() for word in lost(text, page))
    yield from (f"api: {found}" for found in re.findall(r":(?:func|class|mod|meth):|[^\n]*::</p>", page))


def docstrings() -> Iterator[str]:
    """Those that the page of the library shows."""
    import griffe

    waiting = [
        griffe.load("megatron_fspo", search_paths=[ROOT], resolve_aliases=True)[name] for name in LIBRARY
    ]
    while waiting:
        one = waiting.pop()
        if one.docstring is not None:
            # Blocks are code, and roles are for Sphinx.
            text = re.sub(
                r"^( *)(.*?)::\n\n(?:\1    .*\n?|\n)+", r"\2", f"{one.docstring.value}\n", flags=re.MULTILINE
            )
            yield re.sub(r":(?:func|class|mod|meth):", "", text)
        if one.is_module or one.is_class:
            waiting += [
                member
                for member in one.members.values()
                if (member.is_exported if one.is_module else member.is_public) and not member.is_module
            ]


def lost(source: str, page: str) -> list[str]:
    """Words of formulas in a text of Markdown that the page, HTML, does not have."""
    text = re.sub(r"^ *```.*?^ *```$|`+[^`]*`+|^:::.*", " ", source, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\]\([^)]*\)|!?\[(?=[^\]]*\]\()", " ", text)
    text = re.sub(r"\*\*(.+?)\*\*", r"\1", text, flags=re.DOTALL)
    text = re.sub(r"(?<![\w*)])\*(?=\w)([^*]+)\*", r"\1", text)
    words = {re.sub(r"\\([*_|])", r"\1", word) for word in text.split() if _FORMULA.search(word)}
    shown = plain(page)
    return sorted(word for word in words if word not in shown)


def plain(page: str) -> str:
    """The text of HTML."""
    return html.unescape(re.sub(r"<[^>]+>", "", page))


def clicks(site: Path) -> dict[Path, int]:
    """Page, by its folder → links to follow from the first page."""
    distance, waiting = {Path("."): 0}, deque([Path(".")])
    while waiting:
        page = waiting.popleft()
        text = (site / page / "index.html").read_text(encoding="utf-8")
        for link in re.findall(r'href="([^"#:]+)["#]', text):
            target = (site / page / link).resolve()
            if (target / "index.html").is_file():
                folder = target.relative_to(site.resolve())
                if folder not in distance:
                    distance[folder] = distance[page] + 1
                    waiting.append(folder)
    return distance


def search(site: Path, question: str) -> list[str]:
    """Places by relevance; the site's own index, weights and words, without stems."""
    index, words = index_of(site)
    return [one["ref"] for one in index.search(words(question).lower())]


@cache
def index_of(site: Path) -> tuple[Any, Callable[[str], str]]:
    """The index, and what makes words of a text."""
    from lunr import get_default_builder, lunr
    from lunr.stop_word_filter import stop_word_filter

    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))
    weights = {name: options["boost"] for name, options in index["config"]["fields"].items()}
    fields = [{"field_name": name, "boost": int(boost)} for name, boost in weights.items()]

    def words(text: str) -> str:
        return " ".join(re.split(index["config"]["separator"], html.unescape(re.sub(r"<[^>]+>", " ", text))))

    documents = [
        {"location": entry["location"]}
        | {name: words(" ".join(entry.get(name, ())) if name == "tags" else entry[name]) for name in weights}
        for entry in index["docs"]
    ]
    builder = get_default_builder()
    builder.pipeline.reset()
    builder.pipeline.add(stop_word_filter)
    builder.search_pipeline.reset()
    return lunr(ref="location", fields=fields, documents=documents, builder=builder), words


if __name__ == "__main__":
    sys.exit(main())
