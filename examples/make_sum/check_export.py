"""Check that transformers scores the exported checkpoint as the trainer does.

    python examples/make_sum/check_export.py runs/demo

The last rows of ``samples.jsonl`` were sampled with the final weights and have the log-prob of every token.
Scores the same tokens with ``hf/`` in transformers. Exit status 1 if they differ by more than 1e-4 nats.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

TOLERANCE = 1e-4
RESPONSES = 16


@torch.no_grad()
def largest_difference(folder: Path) -> tuple[float, int]:
    """Return the largest |Δ log-prob| in nats and the number of tokens compared."""
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["step"] == rows[-1]["step"]][:RESPONSES]
    temperature = tomllib.loads((folder / "config.toml").read_text())["evaluation"]["temperature"]
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    worst, tokens = 0.0, 0
    for row in last:
        ids = torch.tensor(row["prompt_token_ids"] + row["token_ids"])
        log_probs = torch.log_softmax(model(ids[None]).logits[0] / temperature, dim=-1)
        first = len(row["prompt_token_ids"])
        scored = log_probs[first - 1 : -1].gather(-1, ids[first:, None])[:, 0]
        worst = max(worst, (scored - torch.tensor(row["log_probs"])).abs().max().item())
        tokens += len(row["token_ids"])
    return worst, tokens


if __name__ == "__main__":
    logging.disable_progress_bar()
    difference, count = largest_difference(Path(sys.argv[1]))
    verdict = "the same" if difference <= TOLERANCE else "NOT the same"
    print(
        f"transformers scores the export {verdict}: {count} tokens, largest difference {difference:.1e} nats"
    )
    sys.exit(difference > TOLERANCE)
