"""Accuracy on the validation prompts, in training and by itself: mean@k, pass@k and maj@k, with intervals.

Responses are asked for in portions that follow from the configuration alone. With the embedded engine a
portion is one batch per data-parallel rank, so what shares a batch, and with it the rounding, does not depend
on what was there before: an interrupted evaluation goes on to the same results. All portions are submitted at
once; vLLM's servers work through them without a pause, while those that are done are graded and written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

import torch.distributed as dist

from megatron_fspo.evaluation.records import Key, Record, RecordFile
from megatron_fspo.evaluation.results import metrics_of
from megatron_fspo.evaluation.summary import per_problem, summarize
from megatron_fspo.parallel.groups import ParallelGroups, agreed
from megatron_fspo.rewards import Grader
from megatron_fspo.rollout.engine import RolloutEngine
from megatron_fspo.trainer.prepare import Inputs
from megatron_fspo.trainer.rollout import Rollout
from megatron_fspo.trainer.sampling import ask, collect_and_grade, response_text, sampling_params
from megatron_fspo.types import Completion, Prompt

# Evaluation has streams of its own: the same before and after training, never those of a rollout.
_SEED_OFFSET = 1_000_003


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Accuracy, and what it was made of."""

    metrics: dict[str, float]
    """By set ``val/<set>/``: ``mean@k`` with the ends of its interval, ``pass@j`` for j = 1, 2, 4, … k,
    ``maj@k``, the mean response length, and the share of truncated responses. On every rank."""
    responses: list[dict[str, Any]]
    """The first ``log.responses``, one per prompt first, then the second of each, and so on: prompt,
    response, answer, reward, token ids and their log-probs. On the first rank."""


@dataclass(frozen=True, kw_only=True)
class Portion:
    """Prompts of one set that are asked for together."""

    dataset: str
    prompts: tuple[Prompt, ...]
    samples: int
    """Responses to each."""

    @property
    def keys(self) -> list[Key]:
        """Its completions, in the order of the records."""
        return [(self.dataset, prompt.index, n) for prompt in self.prompts for n in range(self.samples)]


@dataclass(frozen=True)
class Entry:
    """A completion on its way to the first rank, where its answer is added: a rank that grades need not hold
    the tokens."""

    number: int
    """Its number among the completions of the portion."""
    record: Record
    row: tuple[int, dict[str, Any]] | None
    """The row in ``samples.jsonl`` of a run, after its number there; None where it is not kept."""


def sets_of(inputs: Inputs) -> dict[str, list[Prompt]]:
    """The validation prompts by set, in their order."""
    sets: dict[str, list[Prompt]] = {}
    for prompt in inputs.validation:
        sets.setdefault(prompt.dataset, []).append(prompt)
    return sets


def portions(inputs: Inputs, data_ranks: int) -> list[Portion]:
    """Cut the sets into what is asked for together: as many prompts as fill one batch of the engine on every
    data-parallel rank."""
    config = inputs.config
    every = []
    for name, prompts in sets_of(inputs).items():
        samples = config.evaluation_samples[name]
        size = max(1, config.rollout.max_batch // samples) * data_ranks
        for start in range(0, len(prompts), size):
            some = tuple(prompts[start : start + size])
            every.append(Portion(dataset=name, prompts=some, samples=samples))
    return every


def responses_of(inputs: Inputs) -> int:
    """Count the responses that an evaluation asks for, over all ranks."""
    samples = inputs.config.evaluation_samples
    return sum(samples[prompt.dataset] for prompt in inputs.validation)


def evaluate(
    inputs: Inputs,
    engine: RolloutEngine,
    groups: ParallelGroups,
    grader: Grader | None,
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Sample as many responses per validation prompt as its set wants, and grade them. Collective.

    ``grader`` is that of :func:`~megatron_fspo.trainer.sampling.make_grader`; ``progress`` is called with the
    number of responses that have just finished.
    """
    graded = sample_and_grade(inputs, engine, groups, grader, progress)
    samples = inputs.config.evaluation_samples
    metrics = metrics_of(summarize(per_problem(one.record for one in graded), samples)) if graded else {}
    rows = sorted((one.row for one in graded if one.row), key=lambda row: row[0])
    return Evaluation(metrics=shared(metrics, groups), responses=[row for _, row in rows])


def sample_and_grade(
    inputs: Inputs,
    engine: RolloutEngine,
    groups: ParallelGroups,
    grader: Grader | None,
    progress: Callable[[int], None] | None,
    file: RecordFile | None = None,
) -> list[Entry]:
    """Sample and grade all portions, or those that ``file`` lacks: on the first rank it takes what is done,
    portion by portion. Collective.

    Returns:
        on the first rank every completion, without its text; where there is a file, nothing.
    """
    first = agreed(file.done if file is not None else 0, groups)
    left = portions(inputs, groups.dp.size())[first:]
    config = inputs.config
    params = sampling_params(inputs, config.evaluation, 1, config.run.seed + _SEED_OFFSET)
    asked = deque(
        (one, ask(inputs, engine, groups, grader, one.prompts, replace(params, n=one.samples)))
        for one in left
    )
    # By prompt and number, the row of ``samples.jsonl`` that a response is, of those kept there: the first to
    # every prompt, then the second, and so on.
    samples = config.evaluation_samples
    order = (
        (prompt.index, number)
        for number in range(max(samples.values(), default=0))
        for prompt in inputs.validation
        if number < samples[prompt.dataset]
    )
    turns = {key: turn for turn, key in enumerate(islice(order, config.log.responses))}
    done: list[Entry] = []
    while asked:
        portion, batch = asked.popleft()  # and with it go its tokens
        rollout = collect_and_grade(inputs, groups, batch, progress)
        graded = _gathered(_entries(inputs, portion, rollout, turns), rollout, groups)
        if file is not None:
            file.append([one.record for one in graded])
        else:
            done += [replace(one, record=replace(one.record, response="")) for one in graded]
    return done


def _entries(
    inputs: Inputs, portion: Portion, rollout: Rollout, turns: Mapping[tuple[int, int], int]
) -> list[Entry]:
    """Make the entries of the completions that this rank holds, in the order of the records."""
    entries = []
    for number in sorted(rollout.held):
        completion = rollout.held[number]
        position, sample = divmod(number, rollout.samples)
        text = response_text(inputs, completion)
        score = rollout.scores[number].item()
        record = Record(
            dataset=portion.dataset,
            index=rollout.prompts[position].index,
            sample=sample,
            response=text,
            answer=None,
            score=score,
            tokens=completion.length,
            finish_reason=completion.finish_reason,
        )
        turn = turns.get((record.index, sample))
        row = None
        if turn is not None:
            what = {
                "prompt": rollout.prompts[position].text,
                "response": inputs.tokenizer.decode(list(completion.token_ids)),
                "answer": rollout.prompts[position].answer,
                "reward": score,
                "finish_reason": completion.finish_reason,
                "weight_version": completion.weight_version,
                "prompt_token_ids": rollout.prompts[position].token_ids,
                "token_ids": list(completion.token_ids),
                "log_probs": list(completion.log_probs),
                "written": [[one.start, one.stop] for one in completion.written],
                "row_starts": completion.row_starts,
            }
            if inputs.environment is not None:
                what["parts"] = _parts(inputs, completion)
            row = (turn, what)
        entries.append(Entry(number, record, row))
    return entries


def _parts(inputs: Inputs, completion: Completion) -> list[tuple[str, str]]:
    """The response in order: text that the policy ``wrote``, or that the environment ``inserted``, maybe as a
    new ``context``."""
    kinds, parts = completion.kinds, []
    edges = {edge for one in completion.written for edge in (one.start, one.stop)}
    for start, end in pairwise(sorted({0, len(kinds), *edges})):
        ids = list(completion.token_ids[start:end])
        parts.append((("inserted", "wrote", "context")[kinds[start]], inputs.decode(ids)))
    return parts


def _gathered(mine: list[Entry], rollout: Rollout, groups: ParallelGroups) -> list[Entry]:
    """Gather the entries of all data-parallel ranks in the order of the records, with what their grades took
    for the answers, on the first rank; else none. Collective over the first ranks of the model copies."""
    if not groups.first_of_copy:
        return []
    own = (mine, {number: graded.answer for number, graded in rollout.grades.items()})
    parts = [own]
    if groups.dp.size() > 1:
        parts = parts * groups.dp.size() if dist.get_rank() == 0 else []
        dist.gather_object(own, parts or None, dst=0, group=groups.dp)
    answers = {number: answer for _, some in parts for number, answer in some.items()}
    done = sorted((one for some, _ in parts for one in some), key=lambda one: one.number)
    return [replace(one, record=replace(one.record, answer=answers[one.number])) for one in done]


def shared(metrics: dict[str, float], groups: ParallelGroups) -> dict[str, float]:
    """The first rank's, on all of them. Collective; those that wait do so outside of collectives."""
    groups.control.meet("the figures of an evaluation")
    return agreed(metrics, groups)
