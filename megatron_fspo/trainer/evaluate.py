"""Accuracy on the validation prompts, in training and standalone: mean@k, pass@k and maj@k, with intervals.

Responses are requested in portions that depend on the configuration only. With the embedded engine a portion
is one batch per data-parallel rank, so an interrupted evaluation continues with the same batches, and hence
the same rounding and results. All portions are submitted at once, so that vLLM servers never idle while
finished portions are graded and written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

import torch
import torch.distributed as dist

from megatron_fspo.evaluation.intervals import interval_of_ratio
from megatron_fspo.evaluation.records import Key, Record, RecordFile
from megatron_fspo.evaluation.results import summary_metrics
from megatron_fspo.evaluation.summary import per_problem, summarize
from megatron_fspo.mcore.model.policy import Model
from megatron_fspo.mcore.model.policy_loss import Scoring
from megatron_fspo.mcore.passes.score import score_sequences
from megatron_fspo.parallel.groups import ParallelGroups, agreed
from megatron_fspo.rewards import Grader
from megatron_fspo.rollout.engine import RolloutEngine
from megatron_fspo.trainer.prepare import Inputs
from megatron_fspo.trainer.rollout import Rollout
from megatron_fspo.trainer.sampling import ask, collect_and_grade, response_text, sampling_params
from megatron_fspo.types import Completion, Prompt

# Evaluations use the same random streams before and after training, and never those of a rollout.
_SEED_OFFSET = 1_000_003


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Metrics of an evaluation, and some of its responses."""

    metrics: dict[str, float]
    """Under ``val/<set>/``: ``mean@k`` with the ends of its interval, ``pass@j`` for j = 1, 2, 4, … k,
    ``maj@k``, the mean response length, and the share of truncated responses. On every rank."""
    responses: list[dict[str, Any]]
    """The first ``log.responses`` rows (first responses to all prompts, then second ones, and so on): prompt,
    response, answer, reward, token ids, log-probs, and more. Empty except on the first rank."""


@dataclass(frozen=True, kw_only=True)
class Portion:
    """Prompts of one set whose responses are requested together."""

    dataset: str
    prompts: tuple[Prompt, ...]
    samples: int
    """Responses per prompt."""

    @property
    def keys(self) -> list[Key]:
        """The keys of its completions, in the order of the records."""
        return [(self.dataset, prompt.index, n) for prompt in self.prompts for n in range(self.samples)]


@dataclass(frozen=True)
class Entry:
    """A completion's record for the first rank, which adds the answer: the rank that graded a completion may
    not hold its tokens."""

    number: int
    """Index of the completion in the portion."""
    record: Record
    row: tuple[int, dict[str, Any]] | None
    """Row number in the run's ``samples.jsonl``, and the row; None if it is not kept there."""


def by_set(inputs: Inputs) -> dict[str, list[Prompt]]:
    """Return set name → its validation prompts, in their order."""
    sets: dict[str, list[Prompt]] = {}
    for prompt in inputs.validation:
        sets.setdefault(prompt.dataset, []).append(prompt)
    return sets


def portions(inputs: Inputs, data_ranks: int) -> list[Portion]:
    """Split the sets into portions that fill one batch of the embedded engine on every data-parallel rank."""
    config = inputs.config
    every = []
    for name, prompts in by_set(inputs).items():
        samples = config.evaluation_samples[name]
        size = max(1, config.rollout.max_batch // samples) * data_ranks
        for start in range(0, len(prompts), size):
            part = tuple(prompts[start : start + size])
            every.append(Portion(dataset=name, prompts=part, samples=samples))
    return every


def num_responses(inputs: Inputs) -> int:
    """Return the number of responses of an evaluation, over all ranks."""
    samples = inputs.config.evaluation_samples
    return sum(samples[prompt.dataset] for prompt in inputs.validation)


def evaluate(
    inputs: Inputs,
    engine: RolloutEngine,
    groups: ParallelGroups,
    grader: Grader | None,
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Sample and grade the configured number of responses to each validation prompt. Collective.

    ``grader`` comes from :func:`~megatron_fspo.trainer.sampling.make_grader`; ``progress`` is called with the
    number of newly finished responses.
    """
    graded = sample_and_grade(inputs, engine, groups, grader, progress)
    samples = inputs.config.evaluation_samples
    metrics = (
        summary_metrics(summarize(per_problem(entry.record for entry in graded), samples)) if graded else {}
    )
    rows = sorted((entry.row for entry in graded if entry.row), key=lambda row: row[0])
    return Evaluation(metrics=shared(metrics, groups), responses=[row for _, row in rows])


def evaluate_loss(inputs: Inputs, model: Model, scoring: Scoring, groups: ParallelGroups) -> dict[str, float]:
    """Return ``val/<set>/loss``, the cross-entropy of the validation responses in nats per token, with the
    ends of its interval over conversations, on every rank. Collective."""
    config = inputs.config
    given = [(prompt, prompt.demonstration) for prompt in inputs.validation if prompt.demonstration]
    scored = score_sequences(
        lambda batches: model.score(batches, scoring),
        [[*prompt.token_ids, *response.token_ids] for prompt, response in given],
        arch=inputs.arch,
        groups=groups,
        parallel=config.parallel,
        device=inputs.backend.device,
        align=config.fp8.align,
    )
    sets: dict[str, list[tuple[float, int]]] = {}
    for (prompt, response), log_probs in zip(given, scored or (), strict=False):
        own = log_probs[len(prompt.token_ids) - 1 :][torch.tensor(response.loss_mask) > 0]
        sets.setdefault(prompt.dataset, []).append((-own.double().sum().item(), len(own)))
    metrics: dict[str, float] = {}
    for name, pairs in sets.items():
        estimate = interval_of_ratio(name, *zip(*pairs, strict=True))
        metrics |= {f"val/{name}/loss": estimate.value}
        metrics |= {f"val/{name}/loss/low": estimate.low, f"val/{name}/loss/high": estimate.high}
    return shared(metrics, groups)


def sample_and_grade(
    inputs: Inputs,
    engine: RolloutEngine,
    groups: ParallelGroups,
    grader: Grader | None,
    progress: Callable[[int], None] | None,
    file: RecordFile | None = None,
) -> list[Entry]:
    """Sample and grade all portions; return all entries, without the texts of responses, on the first rank.
    With a ``file`` on the first rank, only append to it the portions that it lacks. Collective."""
    first = agreed(file.done if file is not None else 0, groups)
    left = portions(inputs, groups.dp.size())[first:]
    config = inputs.config
    params = sampling_params(inputs, config.evaluation, 1, config.run.seed + _SEED_OFFSET)
    asked = deque(
        (portion, ask(inputs, engine, groups, grader, portion.prompts, replace(params, n=portion.samples)))
        for portion in left
    )
    # (prompt, response number) → line in samples.jsonl: first responses to all prompts, then second ones, …
    samples = config.evaluation_samples
    order = (
        (prompt.index, number)
        for number in range(max(samples.values(), default=0))
        for prompt in inputs.validation
        if number < samples[prompt.dataset]
    )
    lines = {key: line for line, key in enumerate(islice(order, config.log.responses))}
    done: list[Entry] = []
    while asked:
        portion, request = asked.popleft()  # drop the reference, so that its tokens are freed
        rollout = collect_and_grade(inputs, groups, request, progress)
        graded = _gathered(_entries(inputs, portion, rollout, lines), rollout, groups)
        if file is not None:
            file.append([entry.record for entry in graded])
        else:
            done += [replace(entry, record=replace(entry.record, response="")) for entry in graded]
    return done


def _entries(
    inputs: Inputs, portion: Portion, rollout: Rollout, lines: Mapping[tuple[int, int], int]
) -> list[Entry]:
    """Return the entries of the completions that this rank holds, in the order of the records."""
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
        line = lines.get((record.index, sample))
        row = None
        if line is not None:
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
                "written": [[turn.start, turn.stop] for turn in completion.turns],
                "row_starts": completion.row_starts,
            }
            if inputs.environment is not None:
                what["parts"] = _parts(inputs, completion)
            row = (line, what)
        entries.append(Entry(number, record, row))
    return entries


def _parts(inputs: Inputs, completion: Completion) -> list[tuple[str, str]]:
    """Split a response into (kind, text) in order. Kinds: the policy ``wrote`` it, or the environment
    ``inserted`` it, or wrote it as a new ``context``."""
    parts = []
    edges = {edge for turn in completion.turns for edge in (turn.start, turn.stop)}
    for start, end in pairwise(sorted({0, len(completion.token_ids), *edges})):
        inserted = "context" if start in completion.row_starts else "inserted"
        kind = "wrote" if completion.loss_mask[start] else inserted
        parts.append((kind, inputs.decode(list(completion.token_ids[start:end]))))
    return parts


def _gathered(mine: list[Entry], rollout: Rollout, groups: ParallelGroups) -> list[Entry]:
    """Return on the first rank the entries of all data-parallel ranks, in the order of the records, with the
    answers that the graders extracted. Collective over the first ranks of the model replicas."""
    if not groups.is_replica_leader:
        return []
    own = (mine, {number: graded.answer for number, graded in rollout.grades.items()})
    parts = [own]
    if groups.dp.size() > 1:
        parts = parts * groups.dp.size() if dist.get_rank() == 0 else []
        dist.gather_object(own, parts or None, dst=0, group=groups.dp)
    answers = {number: answer for _, entries in parts for number, answer in entries.items()}
    done = sorted((entry for entries, _ in parts for entry in entries), key=lambda entry: entry.number)
    return [replace(entry, record=replace(entry.record, answer=answers[entry.number])) for entry in done]


def shared(metrics: dict[str, float], groups: ParallelGroups) -> dict[str, float]:
    """Return the first rank's metrics on all ranks. Collective, after a meeting of all ranks."""
    groups.control.barrier("the metrics of an evaluation")
    return agreed(metrics, groups)
