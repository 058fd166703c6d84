"""Checks of the built site: every page is near the first one, and a search answers what users ask.

python docs/site_check.py build/site
"""

from __future__ import annotations

import json
import re
import sys
from collections import deque
from pathlib import Path

from lunr import lunr

CLICKS = 3
RESULTS = 3
"""Of a search, that a reader looks at."""
QUESTIONS = {
    "choose c width of the band": "choosing_c",
    "out of memory": "symptoms",
    "resume after kill": "running",
    "write my own reward function": "rewards",
    "use FSPO in TRL": "adapters",
    "canary failed": "symptoms",
    "train with LoRA": "lora",
    "convert checkpoint to Hugging Face": "checkpoints",
    "what does LRE mean": "metrics",
    "tested on GPU": "how_it_works",
}
"""What a user types → the page that answers it."""


def main() -> int:
    """Print what fails; the exit status is 1 if anything does."""
    site = Path(sys.argv[1])
    distance = clicks(site)
    pages = {path.parent.relative_to(site) for path in site.rglob("index.html")}
    problems = [f"{page}: not within {CLICKS} clicks" for page in pages if distance.get(page, 9) > CLICKS]
    for question, page in QUESTIONS.items():
        found = search(site, question)
        if page not in found[:RESULTS]:
            problems.append(f"'{question}' gives {', '.join(found[:5])}, not {page}")
    print("\n".join(problems) or f"{len(pages)} pages, {len(QUESTIONS)} questions: as they should be")
    return bool(problems)


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
    """Pages by relevance, each once; the site's own index, with its weight of titles."""
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))["docs"]
    fields = ({"field_name": "title", "boost": 1000}, {"field_name": "text", "boost": 1})
    results = lunr(ref="location", fields=fields, documents=index).search(question)
    return list(dict.fromkeys(one["ref"].partition("/")[0] for one in results))


if __name__ == "__main__":
    sys.exit(main())
