"""Sampling ahead of the trainer, from a real vLLM server. Needs VLLM_BIN."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runs import rows, run
from serving import Served, serving
from test_vllm_runs import checkpoint, words

__all__ = ["checkpoint"]

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("VLLM_BIN"), reason="VLLM_BIN names no vLLM to test with"),
]


@pytest.fixture(scope="module")
def servers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> object:
    with serving(checkpoint, tmp_path_factory.mktemp("server"), "--dtype", "float32") as found:
        yield found


@pytest.mark.parametrize("bound", [1, 2])
def test_no_token_is_older_than_allowed(
    checkpoint: Path, servers: list[Served], tmp_path: Path, bound: int
) -> None:
    more = ("--rollout.max-staleness", str(bound), "--rollout.max-response-tokens", "60")
    done = run(tmp_path, "run", *words(checkpoint, servers, 6, *more, "--evaluation.every", "3"))
    assert done.returncode == 0, done.stderr[-6000:]
    steps = [row for row in rows(tmp_path, "run") if row["step"] > 0]
    assert [row["training/weight_version"] for row in steps] == [1, 2, 3, 4, 5, 6]
    # The first is fresh; from then on the batches were asked for while an earlier step trained.
    assert [row["rollout/staleness/max"] for row in steps] == [min(i, bound) for i in range(6)]
    assert all(0 <= row["rollout/staleness/mean"] <= bound for row in steps)
    assert any(row["rollout/partial"] > 0 for row in steps), "no update met a response half-way"
    assert all(row["rollout/canary_abs_diff_max"] <= 1e-4 for row in steps)
    # Fresh responses agree with the trainer; older ones differ by what was learned since.
    assert steps[0]["rollout/logprob_abs_diff/max"] <= 1e-3
    assert all(row["actor/grad_norm"] > 0 for row in steps)
