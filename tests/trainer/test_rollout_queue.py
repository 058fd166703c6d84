"""What is asked for when, what a resumed run asks for again, and how old a token may be."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fspo.errors import TrainingError
from megatron_fspo.trainer.rollout import staleness_metrics
from megatron_fspo.trainer.sampling import RolloutQueue, response_text
from megatron_fspo.types import Completion, Sample, VersionSpan
from mismatch_cases import sample
from queues import Engine, make
from rollouts import as_rollout


def test_responses_end_where_the_configuration_says() -> None:
    queue, engine = make(0)
    queue._inputs.config.rollout.stop = ("\n\n",)
    queue._inputs.decode = str  # type: ignore[method-assign,assignment]
    queue.take(0)
    queue.further(0, 1, 2)
    found = [(one.stop_token_ids, one.stop, one.decode, one.max_tokens) for one in engine.params]
    assert found == [((9,), ("\n\n",), str, 4)] * 2
    # A reward reads no stop token, and a stop string.
    for ids, text in (([4, 9], "[4]"), ([4, 5], "[4, 5]"), ([9], "[]")):
        completion = Completion(
            token_ids=ids, log_probs=[-1.0] * len(ids), finish_reason="stop", weight_version=0
        )
        assert response_text(queue._inputs, completion) == text


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
        taken = learn(queue, engine, range(8), [[]] * 8)
        assert [batch for batch, _ in taken] == [prompts for prompts, _ in engine.asked]
        asked.append(engine.asked)
    assert asked[0] == asked[1] == asked[2]
    assert len({seed for _, seed in asked[0]}) == 8


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


@given(staleness=st.integers(0, 4), after=st.integers(0, 4), further=rounds, saved=st.integers(0, 7))
def test_a_resumed_run_goes_on_where_the_trainer_was(
    staleness: int, after: int, further: list[list[int]], saved: int
) -> None:
    """Not where the sampler was; without further prompts also when it looks further ahead, or less."""
    for rounds_of, then in ((further, staleness), ([[]] * 8, after)):
        whole = learn(*make(staleness), range(8), rounds_of)
        first, engine = make(staleness)
        assert learn(first, engine, range(saved), rounds_of) == whole[:saved]
        second, engine = make(then, saved, first.prompts.state_dict())
        assert learn(second, engine, range(saved, 8), rounds_of) == whole[saved:]


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


SETS = [("a", 30, 2.0), ("b", 20, 1.0)]
STEPS = 6


@given(
    ranks=st.sampled_from([2, 4]),
    size=st.integers(4, 12),
    staleness=st.integers(0, 2),
    cut=st.integers(0, STEPS),
)
@settings(max_examples=30)
def test_ranks_are_asked_for_their_share_of_one_order(
    ranks: int, size: int, staleness: int, cut: int
) -> None:
    whole: dict[str, Any] = {"size": size, "sets": SETS, "steps": STEPS}
    single, one = make(staleness, **whole)
    learn(single, one, range(STEPS), [[]] * STEPS)
    each = []
    for rank in range(ranks):
        before, stopped = make(staleness, **whole, rank=rank, ranks=ranks)
        learn(before, stopped, range(cut), [[]] * STEPS)
        after, resumed = make(staleness, cut, before.prompts.state_dict(), **whole, rank=rank, ranks=ranks)
        learn(after, resumed, range(cut, STEPS), [[]] * STEPS)
        each.append(stopped.mine[:cut] + resumed.mine)
    assert len(one.mine) == STEPS
    for step, batch in enumerate(one.mine):
        dealt = [mine[step] for mine in each]
        assert [dealt[position % ranks][position // ranks] for position in range(size)] == batch
        assert len(set(batch)) == size


def written_by(*spans: tuple[int, int, int]) -> Sample:
    """A response with these tokens of these versions."""
    said = tuple(VersionSpan(version=v, start=start, end=end) for v, start, end in spans)
    return sample(0, [-1.0] * spans[-1][2], weight_version=spans[0][0], version_spans=said)


def test_staleness_counts_tokens() -> None:
    samples = [written_by((3, 0, 4)), written_by((4, 0, 10), (5, 10, 16))]
    metrics = staleness_metrics(as_rollout(samples), 5, limit=2)
    assert metrics == {
        "rollout/staleness/mean": pytest.approx((2 * 4 + 1 * 10) / 20),
        "rollout/staleness/max": 2,
        "rollout/partial": 0.5,
    }
    with pytest.raises(TrainingError, match="step 6: a response is from weights 2 versions old"):
        staleness_metrics(as_rollout(samples), 5, limit=1)
