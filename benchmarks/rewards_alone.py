"""A process that calls math-verify and nothing else, for benchmarks/rewards.py. Light: no torch, no pool.

Each line that it reads is JSON, pairs to compare. It answers with the comparisons per second.
"""

from __future__ import annotations

import json
import sys
import time

from megatron_fspo.rewards.math_worker import compare

for line in sys.stdin:
    tasks = json.loads(line)
    began = time.perf_counter()
    for gold, answer in tasks:
        compare(gold, answer)
    print(len(tasks) / (time.perf_counter() - began), flush=True)
