"""Where does the shape of the clip band matter? Shares clipped of short and long responses, by arithmetic.

    python benchmarks/regimes.py

S is normal with Var(S | L) = noise²·L + signal²·L², which crosses from √L to L at L* = (noise / signal)².
Lengths are spread evenly in log L, from the shortest to `ratio` times that. Every band clips one response in
five (c is solved for). What is left to know is the ratio, and the middle length over L*: so this is the
whole map, whatever learning rate, staleness or precision led there. Which place a run has in it, `explain`
measures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm

from machine import ROOT, markdown, options_of

CLIPPED = 0.2
RATIOS = (3, 10, 40)
MIDDLES = (0.01, 0.1, 1.0, 10.0, 100.0)
"""The geometric mean of shortest and longest length, in units of L*."""
SHOWN = (0.01, 1.0, 100.0)
"""Those of the table; the file has all."""
BANDS = {"constant": 0.0, "√L": 0.5, "L": 1.0}
"""Exponent of the width. √(L + L²/L*) has the shape of S itself: its share is CLIPPED at every length."""


def shares(band: str, ratio: float, middle: float) -> tuple[float, float]:
    """Shares clipped at the shortest and at the longest length, if CLIPPED of all are."""
    lengths = middle * np.geomspace(ratio**-0.5, ratio**0.5, 401)
    reach = lengths ** BANDS[band] / np.sqrt(lengths + lengths**2)
    log_c = brentq(lambda at: (2 * norm.sf(np.exp(at) * reach)).mean() - CLIPPED, -30, 30)
    first, *_, last = (2 * norm.sf(np.exp(log_c) * reach)).tolist()
    return first, last


def table(result: Mapping[str, Any]) -> str:
    """Shortest → longest in %."""
    cells = [
        [
            f"{row['ratio']}",
            f"{row['middle']:g}",
            *(f"{row[band][0]:.0%} → {row[band][1]:.0%}" for band in BANDS),
        ]
        for row in result["rows"]
        if row["middle"] in SHOWN
    ]
    return markdown(["longest / shortest", "middle / L*", *BANDS], cells)


def main() -> None:
    """Print the table; write the figures."""
    parser = options_of(__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/regimes.json")
    args = parser.parse_args()
    rows = [
        {"ratio": ratio, "middle": middle, **{band: shares(band, ratio, middle) for band in BANDS}}
        for ratio in RATIOS
        for middle in MIDDLES
    ]
    result = {"command": "python benchmarks/regimes.py", "rows": rows}
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()
