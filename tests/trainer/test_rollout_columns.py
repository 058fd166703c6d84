"""What every rank knows of a response, against a reading of the response itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fspo.trainer.rollout import staleness_metrics
from megatron_fspo.types import Prompt, Sample, VersionSpan
from mismatch_cases import sample
from rollouts import as_rollout

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
    several = [len({*versions(sample)}) > 1 for sample in samples]
    assert metrics["rollout/partial"] == pytest.approx(sum(several) / len(samples))
    assert rollout.lengths.tolist() == [len(versions(sample)) for sample in samples]
    assert rollout.truncated.all() and (rollout.rewards == 0.5).all()


def test_an_empty_response_counts_no_token() -> None:
    rollout = as_rollout([sample(1, [], weight_version=3)])
    assert rollout.fresh_from(3).tolist() == rollout.fresh_from(4).tolist() == [1]
    assert staleness_metrics(rollout, 4, limit=1)["rollout/staleness/mean"] == 0
