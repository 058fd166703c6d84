"""Several training sets in the trainer: what each data-parallel rank is asked for, also after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch import REPO
from megatron_fspo.config.loading import load_config
from megatron_fspo.data.cursor import PromptCursor
from megatron_fspo.errors import InputError
from megatron_fspo.job.consistency import facts
from megatron_fspo.trainer.prepare import Inputs, prepare
from megatron_fspo.trainer.sampling import RolloutQueue
from megatron_fspo.types import Prompt, SamplingParams

PROMPTS = tuple(
    Prompt(index=i, token_ids=(i,), text="", answer="1", dataset="a" if i < 30 else "b") for i in range(50)
)
SETS = [("a", 30, 2.0), ("b", 20, 1.0)]
STEPS = 6


class Engine:
    """Writes down which prompts this rank is asked for."""

    def __init__(self) -> None:
        self.mine: list[list[int]] = []

    def submit(self, prompts: list[Prompt], params: SamplingParams, mine: range, arrived: None) -> object:
        self.mine.append([prompts[position].index for position in mine])
        return None


def make(
    rank: int, ranks: int, size: int, staleness: int, step: int = 0, state: dict[str, Any] | None = None
) -> tuple[RolloutQueue, Engine]:
    groups: Any = SimpleNamespace(dp=SimpleNamespace(rank=lambda: rank, size=lambda: ranks))
    rollout = dict(
        prompts=size,
        samples=2,
        temperature=1.0,
        top_p=1.0,
        max_response_tokens=4,
        max_staleness=staleness,
        stop=(),
    )
    config = SimpleNamespace(rollout=SimpleNamespace(**rollout), run=SimpleNamespace(seed=7, steps=STEPS))
    inputs: Any = SimpleNamespace(config=config, train=PROMPTS, stop_token_ids=(9,), decode=None)
    prompts = PromptCursor(SETS, seed=7, size=size)
    if state is not None:
        prompts.load_state_dict(json.loads(json.dumps(state)))
    engine: Any = Engine()
    return RolloutQueue(inputs, engine, groups, None, prompts, step), engine


def walk(queue: RolloutQueue, first: int, last: int) -> None:
    for step in range(first, last):
        queue.take(step)
        queue.ask(step)


@given(
    ranks=st.sampled_from([2, 4]),
    size=st.integers(4, 12),
    staleness=st.integers(0, 2),
    cut=st.integers(0, STEPS),
)
@settings(deadline=None, max_examples=30)
def test_ranks_are_asked_for_their_share_of_one_order(
    ranks: int, size: int, staleness: int, cut: int
) -> None:
    single, one = make(0, 1, size, staleness)
    walk(single, 0, STEPS)
    each = []
    for rank in range(ranks):
        before, stopped = make(rank, ranks, size, staleness)
        walk(before, 0, cut)
        after, resumed = make(rank, ranks, size, staleness, step=cut, state=before.prompts.state_dict())
        walk(after, cut, STEPS)
        each.append(stopped.mine[:cut] + resumed.mine)
    assert len(one.mine) == STEPS
    for step, batch in enumerate(one.mine):
        dealt = [mine[step] for mine in each]
        assert [dealt[position % ranks][position // ranks] for position in range(size)] == batch
        assert len(set(batch)) == size


def read(folder: Path, prompts: int) -> Inputs:
    """The make-sum example with its training prompts in two files, the first of 20 prompts, and two
    evaluation sets."""
    lines = (REPO / "examples/make_sum/train.jsonl").read_text().splitlines(keepends=True)
    (folder / "a.jsonl").write_text("".join(lines[:20] + lines[:3]))
    (folder / "b.jsonl").write_text("".join(lines[20:]))
    (folder / "run.toml").write_text((REPO / "examples/make_sum/run.toml").read_text())
    words = {
        "model.checkpoint": REPO / "examples/make_sum/checkpoint",
        "parallel.tensor": 1,
        "parallel.sequence": "false",
        "rollout.prompts": prompts,
    }
    overrides = [f"--{key}={value}" for key, value in words.items()]
    sets = "[{file = 'a.jsonl', name = 'first'}, {file = 'b.jsonl'}]"
    config = load_config(folder / "run.toml", [*overrides, "--data.train", TRAIN, "--data.validation", sets])
    return prepare(config, world_size=1)


TRAIN = "[{file = 'a.jsonl', weight = 1}, {file = 'b.jsonl', weight = 3}]"


def test_a_run_of_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inputs = read(tmp_path, prompts=16)
    assert [prompt.index for prompt in inputs.train] == list(range(68))
    assert [prompt.dataset for prompt in inputs.train] == ["a"] * 20 + ["b"] * 48
    assert [prompt.dataset for prompt in inputs.validation] == ["first"] * 20 + ["b"] * 48
    assert [prompt.index for prompt in inputs.validation] == list(range(68))
    assert (
        inputs.notes
        == ("a.jsonl: 20 prompts of 23 rows; left out: 3 with the prompt and answer of an earlier row",) * 2
    )
    named = {fact for fact in facts(inputs.config, trains=True) if fact.startswith("the file of data")}
    assert named == {f"the file of data.{key}, {x}.jsonl," for key in ("train", "validation") for x in "ab"}
    with pytest.raises(InputError) as caught:
        read(tmp_path, prompts=64)
    assert str(caught.value) == (
        "rollout.prompts = 64, up to 49 of them of b, but b.jsonl has only 48 prompts"
    )
