"""docs/gallery.md and its pictures, from the recorded run in docs/gallery/run.

    python docs/make_gallery.py

The run is that of the page's first command; its config.toml, metrics.jsonl and sequences.jsonl are kept.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_fspo.lab.report.charts import as_svg
from megatron_fspo.lab.report.page import write_report

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from dark import for_dark  # noqa: E402

RUN = HERE / "gallery/run"
TRAIN = (
    "megatron-fspo train --config examples/make_sum/run.toml --run.steps 6 --evaluation.every 0 \\\n"
    "    --parallel.tensor 1 --parallel.sequence false --log.sequences 128 --run.name gallery"
)
REPORT = {
    "Reward": "Six steps are too few to show a trend.",
    "Clip rate": "A level curve is healthy. A rise towards 100% means that steps are too large for the band.",
    "Clip rate by length": "Flat is fair. A bin whose bar (95%) misses the dashed line is clipped too often "
    "or too rarely.",
    "Length Reweighting Error": "With the mean at the dashed floor, clipping depends on length no more than "
    "by chance.",
    "S against √L": "The points should spread with length as the band (black) does.",
    "Noise σ̂ and width c": "c near 2σ̂ clips the tails ([How to choose c](choosing_c.md)).",
}
"""Title in the report → what to look for."""
EXPLAIN = {
    "Outside, at the same rate": "Each loss leaves the same share outside, at different lengths.",
    "Effective sample size": "Near 1, responses contribute alike; near 0, a few dominate the gradient.",
    "Gradient mass": "Losses that count responses follow their share of responses, losses that count tokens "
    "their share of tokens.",
}
"""The same of the page of ``explain``."""


def name_of(title: str) -> str:
    """Of the picture's file."""
    words = title.lower().replace("σ̂", "sigma").replace("√l", "sqrt-l")
    return "-".join(re.findall(r"[a-z0-9]+", words)) + ".svg"


def pictures_of(page: Path, titles: dict[str, str]) -> dict[str, str]:
    """File → svg of the page's figures with these titles."""
    text = page.read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', text)
    figures = json.loads(data)
    places = re.findall(r'id="([^"]+)" role="img" aria-label="([^"]+)"', text)
    found = {title: figures[name] for name, title in places}
    # Outside of the page there is nothing behind the picture.
    white = {name: {**one, "config": one["config"] | {"background": "white"}} for name, one in found.items()}
    return {name_of(title): for_dark(as_svg(white[title])) for title in titles}


def draw() -> dict[str, str]:
    """All pictures, by ``report`` and ``explain`` themselves."""
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "gallery"
        shutil.copytree(RUN, run)
        explain = ["-m", "megatron_fspo", "explain", str(run), "--out", str(run / "explained")]
        subprocess.run([sys.executable, *explain], check=True, capture_output=True)
        page = run / "explained/index.html"
        return pictures_of(write_report(run), REPORT) | pictures_of(page, EXPLAIN)


def _section(titles: dict[str, str]) -> str:
    return "\n\n".join(
        f"**{title}.** {words}\n\n![{title}](gallery/{name_of(title)})" for title, words in titles.items()
    )


def render() -> str:
    """The page."""
    return f"""\
# Gallery

Read this if you want to see the figures of a run before you make one. They come from a run of half a
minute on one core ([recorded](gallery/run)):

```
{TRAIN}
```

## `megatron-fspo report`

`train` draws these figures when it ends. To draw them again:

```
megatron-fspo report runs/gallery
```

{_section(REPORT)}

## `megatron-fspo explain`

```
megatron-fspo explain runs/gallery --out runs/gallery-explained
```

{_section(EXPLAIN)}

## Elsewhere

- [Clip rate against length](fairness.svg) at the same overall rate:
  [Evidence](evidence.md#ledger-does-clipping-matter).
- `megatron-fspo calibrate --config examples/make_sum/run.toml --nproc 2` draws what noise does to the
  band: [FP8](fp8.md).

**Next**: [Metrics](metrics.md) · [explain](explain.md)
"""


def main() -> None:
    for name, svg in draw().items():
        (HERE / "gallery" / name).write_text(svg + "\n", encoding="utf-8")
    (HERE / "gallery.md").write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
