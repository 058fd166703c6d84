"""docs/gallery.md and its pictures, from the recorded run in docs/gallery/run.

    python docs/make_gallery.py

The run is that of the page's first command; its config.toml, metrics.jsonl and sequences.jsonl are kept.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_fspo.lab.report.page import write_report

HERE = Path(__file__).parent
RUN = HERE / "gallery/run"
TRAIN = (
    "megatron-fspo train --config examples/make_sum/run.toml --run.steps 6 --evaluation.every 0 \\\n"
    "    --parallel.tensor 1 --parallel.sequence false --log.sequences 128 --run.name gallery"
)
REPORT = {
    "Reward": "Over six steps: a run of this length shows that things work, and nothing else.",
    "Clip rate": "Level is healthy; a rise towards 100% means steps too large for the band.",
    "Clip rate by length": "Flat is fair: a bin that leaves the dashed overall rate by more than its bar "
    "(95%) is a length that the clip favours or punishes.",
    "Length Reweighting Error": "The mean at the dashed floor: clips depend on length as chance does, "
    "and no more.",
    "S against √L": "The cloud should widen as the band (black) does.",
    "Noise σ̂ and width c": "c near 2σ̂ clips the tails ([choosing_c.md](choosing_c.md)).",
}
"""Title in the report → what to look for."""
EXPLAIN = {
    "Outside, at the same rate": "The same share of the responses for each loss, spread over lengths in "
    "another way.",
    "Effective sample size": "Near 1 all responses of a length teach alike, near 0 a few have all the "
    "gradient.",
    "Gradient mass": "A loss that counts each response once gives every bin its share of the responses, one "
    "that counts tokens the share of the tokens.",
}
"""The same of the page of ``explain``."""


def name_of(title: str) -> str:
    """Of the picture's file."""
    words = title.lower().replace("σ̂", "sigma").replace("√l", "sqrt-l")
    return "-".join(re.findall(r"[a-z0-9]+", words)) + ".svg"


def pictures_of(page: Path, titles: dict[str, str]) -> dict[str, str]:
    """File → svg of the page's figures with these titles."""
    found = dict(re.findall(r'aria-label="([^"]+)">(<svg.*?</svg>)', page.read_text(encoding="utf-8"), re.S))
    # Outside of the page there is nothing behind the picture.
    white = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return {name_of(title): found[title].replace(">", f">{white}", 1) for title in titles}


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

The figures one gets, each with its command. They are from a run of half a minute on one core, recorded in
[`docs/gallery/run`](gallery/run); made by `make docs`. [metrics.md](metrics.md) says what a healthy run
shows.

```
{TRAIN}
```

## `megatron-fspo report`

`train` draws it at its end, and this at any time:

```
megatron-fspo report runs/gallery
```

{_section(REPORT)}

## `megatron-fspo explain`

```
megatron-fspo explain runs/gallery --out runs/gallery-explained
```

[explain.md](explain.md) says what the figures are.

{_section(EXPLAIN)}

## Elsewhere

- `make evidence` draws the [clip rate against length](fairness.svg) of four bands at a matched clip
  rate: [evidence.md](evidence.md#make-sum-bands-widths-and-losses).
- `python docs/make_parallelism.py` draws [what is reduced where](parallelism.svg):
  [parallelism.md](parallelism.md).
- `megatron-fspo calibrate --config examples/make_sum/run.toml --nproc 2` draws what noise does to the band,
  in a page of its own: [fp8.md](fp8.md).
"""


def main() -> None:
    for name, svg in draw().items():
        (HERE / "gallery" / name).write_text(svg + "\n", encoding="utf-8")
    (HERE / "gallery.md").write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
