"""What is asked for when, what a resumed run asks for again, and what every rank knows of a response."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fspo.config import Config
from megatron_fspo.data.cursor import PromptCursor
from megatron_fspo.errors import TrainingError
from megatron_fspo.trainer.rollout import staleness_metrics
from megatron_fspo.trainer.sampling import RolloutQueue, response_text
from megatron_fspo.types import Completion, Prompt, Sample, SamplingParams, VersionSpan
from mismatch_cases import as_rollout, sample


class Engine:
    """Writes down what is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int]] = []
        """The prompts of all ranks, and the seed."""
        self.mine: list[list[int]] = []
        """The prompts of this rank."""
        self.params: list[SamplingParams] = []

    def submit(self, prompts: list[Prompt], params: SamplingParams, mine: range, arrived: None) -> object:
        self.asked.append(([prompt.index for prompt in prompts], params.seed))
        self.mine.append([prompts[position].index for position in mine])
        self.params.append(params)
        return None


def make(
    staleness: int,
    step: int = 0,
    state: dict[str, Any] | None = None,
    *,
    size: int = 3,
    steps: int = 8,
    sets: list[tuple[str, int, float]] | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> tuple[RolloutQueue, Engine]:
    """A queue of a run of so many steps, ``size`` prompts each; ``state``: of the prompts, to go on from."""
    sets = sets or [("", 10, 1.0)]
    groups: Any = SimpleNamespace(dp=SimpleNamespace(rank=lambda: rank, size=lambda: ranks))
    rollout = dict(temperature=1.0, top_p=1.0, max_response_tokens=4, max_staleness=staleness, stop=())
    rollout |= dict(prompts=size, samples=2)
    run: Any = SimpleNamespace(seed=7, steps=steps)
    config: Any = Config.model_construct(rollout=SimpleNamespace(**rollout), run=run)
    train = [
        Prompt(index=i, token_ids=(i,), text="", answer="") for i in range(sum(count for _, count, _ in sets))
    ]
    inputs: Any = SimpleNamespace(config=config, arch=None, train=train, stop_token_ids=(9,), decode=None)
    inputs.environment = None
    prompts = PromptCursor(sets, seed=7, size=size)
    if state is not None:
        prompts.load_state_dict(json.loads(json.dumps(state)))
    engine: Any = Engine()
    return RolloutQueue(inputs, engine, groups, None, prompts, step), engine


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
        state = first.prompts.state_dict()
        first.take(saved)  # a step that is broken off between its rounds is done again
        first.further(saved, 1, 1)
        second, engine = make(then, saved, state)
        assert learn(second, engine, range(saved, 8), rounds_of) == whole[saved:]


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


STEP = 9


def sample_of(prompt: int, runs: list[tuple[int, int]], spelled: bool) -> Sample:
    """Tokens of versions that grow: ``runs`` of (versions on, tokens); one version may go without saying."""
    spans, version, end = [], 0, 0
    for more, count in runs:
        version += more + bool(spans)
        spans.append(VersionSpan(version=version, start=end, end=end + count))
        end += count
    ids = range(end)
    said = tuple(spans) if spelled or len(spans) > 1 else ()
    one = sample(0, [-1.0] * end, token_ids=ids, weight_version=spans[0].version, version_spans=said)
    words = Prompt(index=0, token_ids=tuple(range(1, prompt + 1)), text="", answer="")
    return replace(one, prompt=words, reward=0.5)


def versions(sample: Sample) -> list[int]:
    """Of every token."""
    completion = sample.completion
    if not completion.version_spans:
        return [completion.weight_version] * len(completion.token_ids)
    return [span.version for span in completion.version_spans for _ in range(span.start, span.end)]


RUNS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=3)
SAMPLES = st.lists(st.builds(sample_of, st.integers(1, 5), RUNS, st.booleans()), min_size=1, max_size=6)


@given(SAMPLES, st.integers(0, 8))
def test_columns_say_what_the_responses_say(samples: list[Sample], version: int) -> None:
    rollout = as_rollout(samples)
    fresh = rollout.fresh_from(version).tolist()
    for one, first in zip(samples, fresh, strict=True):
        written, before = versions(one), len(one.prompt.token_ids) - 1
        # From there on, and no token earlier, all are this version's.
        end = len(written)
        while end and written[end - 1] == version:
            end -= 1
        assert first == before + end
    metrics = staleness_metrics(rollout, STEP, limit=STEP)
    every = [STEP - version for sample in samples for version in versions(sample)]
    assert metrics["rollout/staleness/mean"] == pytest.approx(sum(every) / len(every), rel=1e-12)
    assert metrics["rollout/staleness/max"] == max(every)
    with pytest.raises(TrainingError, match=f"step 10: a response is from weights {max(every)} versions old"):
        staleness_metrics(rollout, STEP, limit=max(every) - 1)
    several = [len({*versions(sample)}) > 1 for sample in samples]
    assert metrics["rollout/partial"] == pytest.approx(sum(several) / len(samples))
    assert rollout.lengths.tolist() == [len(versions(sample)) for sample in samples]
    assert rollout.truncated.all() and (rollout.rewards == 0.5).all()


def test_an_empty_response_counts_no_token() -> None:
    rollout = as_rollout([sample(1, [], weight_version=3)])
    assert rollout.fresh_from(3).tolist() == rollout.fresh_from(4).tolist() == [1]
    assert staleness_metrics(rollout, 4, limit=1)["rollout/staleness/mean"] == 0
