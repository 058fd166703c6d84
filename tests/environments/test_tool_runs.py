"""Trajectories through the trainer: the sampler's log-probs are the trainer's; and the tool of make-sum."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from examples.make_sum.make_sum import demonstration
from examples.make_sum.tool import remainder
from launch import REPO, forked, why
from megatron_fspo.types import Prompt
from runs import PROGRAM, rows, train_words


@pytest.mark.slow
def test_a_run_with_turns_is_on_policy_and_logs_them(tmp_path: Path) -> None:
    """Two tensor-parallel ranks, one of which asks the environment."""
    words = "--run.steps 2 --checkpoint.every 0 --reward.name environment --environment.workers 1".split()
    words += "--environment.name own_environment:two_digits --rollout.max-response-tokens 100".split()
    words += ["--rollout.stop", '["9"]']
    more = {"PYTHONPATH": f"{REPO}:{REPO / 'tests/environments'}", "DRAW_REPORT": "1"}
    done = forked([*PROGRAM, *train_words(tmp_path, "run", *words)], nproc=2, **more)
    assert done.returncode == 0, why(done.stderr)
    steps = [row for row in rows(tmp_path, "run") if "actor/grad_norm" in row]
    assert len(steps) == 2
    for row in steps:
        assert row["fspo/on_policy_abs_s_max"] == 0 and row["rollout/logprob_abs_diff/max"] < 1e-4
        assert 3 < row["environment/turns/mean"] <= row["environment/turns/max"] == 4
        assert 1 < row["environment/rows/mean"] <= row["environment/rows/max"] == 2
        assert 0 < row["perf/environment_seconds/mean"] <= row["perf/environment_seconds/max"]
        assert row["environment/failed"] == 0 and 0.05 < row["environment/inserted"] < 0.3
        assert 0 < row["critic/rewards/mean"] < 1
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    several = [one for one in samples if len(one["written"]) == 4]
    assert several
    for one in several:
        # Two digits between any two turns: how long the text of the turn before was.
        for (start, end), (following, _) in pairwise(one["written"]):
            text = one["response"][start:end].removesuffix("$")
            inserted = one["response"][end:following]
            context = one["prompt"] if [end] == one["row_starts"] else ""
            assert inserted == f"{context}{len(text):02d}"
        kinds, texts = zip(*one["parts"], strict=True)
        assert kinds == ("wrote", "inserted", "wrote", "context", "wrote", "inserted", "wrote")
        assert "".join(texts) == one["response"] and one["row_starts"] == [one["written"][1][1]]


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        (["9="], "10"),
        (["9=", "9="], "01"),
        (["9=", "9=", "1"], 1.0),
        (["991"], 1.0),
        (["99="], "01"),
        (["9=", "99="], 0.0),
        (["0="], 0.0),
        (["9=", ""], 0.0),
        (["=="], 0.0),
        (["9", "1="], "09"),
        ([""], 0.0),
    ],
)
def test_the_tool_of_make_sum(turns: Sequence[str], said: str | float) -> None:
    assert remainder(Prompt(index=0, token_ids=(1,), text="^19=", answer="19"), turns) == said


def test_demonstrations_ask_the_tool_for_what_it_says() -> None:
    generator = random.Random(1)
    for number in range(3, 80):
        prompt = Prompt(index=0, token_ids=(1,), text="", answer=str(number))
        asking, silent = (demonstration(number, generator, calls).removesuffix("$") for calls in (1.0, 0.0))
        assert remainder(prompt, [silent]) == 1.0 and "=" not in silent
        turns: list[str] = []
        for group in range(0, len(asking), 4):
            turns.append(asking[group : group + 2])
            assert remainder(prompt, turns) == asking[group + 2 : group + 4]
        assert remainder(prompt, [*turns, ""]) == 1.0
