"""Kills of runs that sample ahead of the training, from one real vLLM server that outlives them.

Which weights sample which token depends on the clock, so no number is compared: prompts and their order,
steps and rows, what is logged, and how old the tokens are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
sys.path += [str(REPO / "tests/real_vllm"), str(REPO / "tests/cluster")]

from kill_checks import LIMIT  # noqa: E402
from kill_runs import Harness, Kill, run_all  # noqa: E402
from serving import serving  # noqa: E402
from serving_node import wide_checkpoint  # noqa: E402

SERVER = ("--dtype", "float32", "--", "--max-model-len", "128", "--max-num-seqs", "16")


def run_ahead(folder: Path, kills: Sequence[Kill]) -> tuple[list[str], list[Kill]]:
    """The problems of all kills, and those that did not happen."""
    checkpoint = wide_checkpoint(folder / "model")
    with serving(checkpoint, folder, *SERVER, "--max-num-batched-tokens", "160") as (server,):
        # Hardly any response is right: the entropy bonus moves the weights.
        words = f"--model.checkpoint {checkpoint} --rollout.engine vllm --rollout.max-staleness {LIMIT}"
        short = "--rollout.max-response-tokens 24 --loss.entropy-coef 0.1"
        extra = (*words.split(), *short.split(), "--vllm.urls", str([server.url]))
        harness = Harness(folder, extra, exact=False)
        never = run_all(harness, kills)
        print(f"the server started {server.starts} time(s)")
        alive = server.process.poll() is None and server.starts == 1
    return harness.problems + ([] if alive else ["the server died"]), never
