"""Seconds that ``megatron-fspo explain`` takes to read a dump and work out its figures.

    python benchmarks/explain_speed.py --responses 100000

Dumps are synthetic: lengths up to 4,000 tokens and S ~ Normal(0, 0.02²·L); with token log-probs up to 100
tokens. Starting Python and drawing the page are left out.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet

from machine import options_of
from megatron_fspo.lab.explain.command import explain


def sums(count: int, random: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Rows with L, S and A."""
    lengths = random.integers(1, 4000, count)
    log_ratio_sum = 0.02 * np.sqrt(lengths) * random.standard_normal(count)
    for length, s, advantage in zip(
        lengths.tolist(), log_ratio_sum.tolist(), random.normal(size=count), strict=True
    ):
        yield {"length": length, "log_ratio_sum": s, "advantage": float(advantage)}


def tokens(count: int, random: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Rows with token log-probs and A."""
    for length in random.integers(1, 100, count).tolist():
        old = -1.0 - random.random(length)
        new = old + 0.02 * random.standard_normal(length)
        yield {"old_log_probs": old.tolist(), "log_probs": new.tolist(), "advantage": float(random.normal())}


def main() -> None:
    """Write each dump, read it back, and print the seconds."""
    parser = options_of(__doc__)
    parser.add_argument("--responses", type=int, default=100_000, help="of each dump (default %(default)s)")
    count = parser.parse_args().responses
    for name, make in (("L, S, A", sums), ("token log-probs", tokens)):
        rows = list(make(count, np.random.default_rng(1)))
        with tempfile.TemporaryDirectory() as folder:
            lines, table = Path(folder, "dump.jsonl"), Path(folder, "dump.parquet")
            lines.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            parquet.write_table(pyarrow.Table.from_pylist(rows), table)
            del rows
            for path in (lines, table):
                wall, cpu = time.perf_counter(), time.process_time()
                explain(path, [], [], step=None, rate=None)
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                what = f"{name}, {path.suffix}, {path.stat().st_size / 1e6:.0f} MB"
                print(f"{what}: {cpu:.1f} s of one core, {wall:.1f} s by the clock")


if __name__ == "__main__":
    main()
