"""What is asked for when, what a resumed run asks for again, and how old a token may be."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fspo.data.cursor import PromptCursor
from megatron_fspo.errors import TrainingError
from megatron_fspo.trainer.rollout import staleness_metrics
from megatron_fspo.trainer.sampling import RolloutQueue
from megatron_fspo.types import Completion, Prompt, Sample, SamplingParams, VersionSpan
from rollouts import as_rollout

PROMPTS = tuple(Prompt(index=i, token_ids=(i,), text="", answer="") for i in range(10))
GROUPS: Any = SimpleNamespace(dp=SimpleNamespace(rank=lambda: 0, size=lambda: 1))


class Engine:
    """Writes down what is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int]] = []
        self.params: list[SamplingParams] = []

    def submit(self, prompts: list[Prompt], params: SamplingParams, mine: range, arrived: None) -> object:
        self.asked.append(([prompt.index for prompt in prompts], params.seed))
        self.params.append(params)
        return None


def make(
    staleness: int, steps: int = 8, step: int = 0, state: dict | None = None
) -> tuple[RolloutQueue, Engine]:
    rollout: dict[str, Any] = dict(
        prompts=3,
        samples=2,
        temperature=1.0,
        top_p=1.0,
        max_response_tokens=4,
        max_staleness=staleness,
        stop=(),
    )
    config = SimpleNamespace(rollout=SimpleNamespace(**rollout), run=SimpleNamespace(seed=7, steps=steps))
    inputs: Any = SimpleNamespace(config=config, train=PROMPTS, stop_token_ids=(9,), decode=None)
    prompts = PromptCursor([("", len(PROMPTS), 1.0)], seed=1, size=rollout["prompts"])
    if state is not None:
        prompts.load_state_dict(state)
    engine: Any = Engine()
    return RolloutQueue(inputs, engine, GROUPS, None, prompts, step), engine


def walk(queue: RolloutQueue, steps: range) -> list[list[int]]:
    """The prompts of these steps, as the trainer takes them."""
    taken = []
    for step in steps:
        taken.append([prompt.index for prompt in queue.take(step).prompts])
        queue.ask(step)
    return taken


def test_responses_end_where_the_configuration_says() -> None:
    queue, engine = make(0)
    queue._inputs.config.rollout.stop = ("\n\n",)
    queue._inputs.decode = str  # type: ignore[method-assign,assignment]
    queue.take(0)
    queue.further(0, 1, 2)
    found = [(one.stop_token_ids, one.stop, one.decode, one.max_tokens) for one in engine.params]
    assert found == [((9,), ("\n\n",), str, 4)] * 2


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_how_far_ahead(staleness: int) -> None:
    queue, engine = make(staleness)
    for step in range(8):
        queue.take(step)
        assert len(engine.asked) == (min(step + max(staleness, 1), 8) if step else 1)
        queue.ask(step)
        assert len(engine.asked) == min(step + staleness + 1, 8)


def test_what_is_asked_does_not_depend_on_how_far_ahead() -> None:
    asked = []
    for staleness in (0, 1, 5):
        queue, engine = make(staleness)
        taken = walk(queue, range(8))
        assert taken == [prompts for prompts, _ in engine.asked]
        asked.append(engine.asked)
    assert asked[0] == asked[1] == asked[2]
    assert len({seed for _, seed in asked[0]}) == 8


@given(st.integers(0, 4), st.integers(0, 4), st.integers(1, 7))
def test_a_resumed_run_goes_on_where_the_trainer_was(before: int, after: int, saved: int) -> None:
    """Not where the sampler was; also when it looks further queue, or less."""
    whole = walk(make(0)[0], range(8))
    first, _ = make(before)
    assert walk(first, range(saved)) == whole[:saved]
    second, _ = make(after, step=saved, state=first.prompts.state_dict())
    assert walk(second, range(saved, 8)) == whole[saved:]


def learn(queue: RolloutQueue, engine: Engine, steps: range, further: list[list[int]]) -> list[list[Any]]:
    """As the trainer goes through these steps, with so many further prompts in the rounds of each.

    Returns:
        for each step the prompts of its batch and what its rounds asked of the engine, with their seeds.
    """
    found = []
    for step in steps:
        batch = [prompt.index for prompt in queue.take(step).prompts]
        before = len(engine.asked)
        for number, prompts in enumerate(further[step], start=1):
            queue.further(step, number, prompts)
        found.append([batch, engine.asked[before:]])
        queue.ask(step)
    return found


rounds = st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=8, max_size=8)


@given(staleness=st.integers(0, 4), further=rounds, saved=st.integers(0, 7))
def test_a_resumed_run_asks_for_the_same_further_prompts(
    staleness: int, further: list[list[int]], saved: int
) -> None:
    whole = learn(*make(staleness), range(8), further)
    first, engine = make(staleness)
    assert learn(first, engine, range(saved), further) == whole[:saved]
    state = json.loads(json.dumps(first.prompts.state_dict()))
    second, engine = make(staleness, step=saved, state=state)
    assert learn(second, engine, range(saved, 8), further) == whole[saved:]


def test_a_step_that_is_broken_off_between_rounds_is_done_again() -> None:
    """What a checkpoint of before the step holds does not know of its rounds."""
    further = [[2, 1], [3], [1, 1, 2], [], [2], [3, 3], [], [1]]
    for staleness in (0, 1, 3):
        whole = learn(*make(staleness), range(8), further)
        queue, engine = make(staleness)
        learn(queue, engine, range(2), further)
        state = queue.prompts.state_dict()
        queue.take(2)
        queue.further(2, 1, 1)
        again, engine = make(staleness, step=2, state=state)
        assert learn(again, engine, range(2, 8), further) == whole[2:]


def test_a_run_that_resumes_with_another_staleness_loses_no_batch() -> None:
    further = [[2], [1, 2], [], [2], [1], [], [3], [2]]
    first, engine = make(3)
    learn(first, engine, range(2), further)
    ahead_of = [prompts for prompts, _ in engine.asked if len(prompts) == 3][-3:]
    for staleness in (0, 1, 5):
        second, engine = make(staleness, step=2, state=first.prompts.state_dict())
        assert [batch for batch, _ in learn(second, engine, range(2, 8), further)][:3] == ahead_of


def test_every_round_has_streams_of_its_own() -> None:
    """All ten prompts come several times in one step: never with the seed of another round or step."""
    queue, engine = make(2)
    learn(queue, engine, range(8), [[3, 3, 3, 3]] * 8)
    seeds = [seed for _, seed in engine.asked]
    assert len(set(seeds)) == len(seeds) == 8 * 5


def sample(*spans: tuple[int, int, int]) -> Sample:
    length = spans[-1][2]
    completion = Completion(
        token_ids=(1,) * length,
        log_probs=(-1.0,) * length,
        finish_reason="length",
        weight_version=min(version for version, _, _ in spans),
        version_spans=tuple(VersionSpan(version=v, start=start, end=end) for v, start, end in spans),
    )
    return Sample(prompt=PROMPTS[0], number=0, completion=completion, reward=0.0, advantage=0.0)


def test_staleness_counts_tokens() -> None:
    samples = [sample((3, 0, 4)), sample((4, 0, 10), (5, 10, 16))]
    metrics = staleness_metrics(as_rollout(samples), 5, limit=2)
    assert metrics == {
        "rollout/staleness/mean": pytest.approx((2 * 4 + 1 * 10) / 20),
        "rollout/staleness/max": 2,
        "rollout/partial": 0.5,
    }
    with pytest.raises(TrainingError, match="step 6: a response is from weights 2 versions old"):
        staleness_metrics(as_rollout(samples), 5, limit=1)
