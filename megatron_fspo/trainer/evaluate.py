"""Accuracy on the validation prompts: mean@k and the unbiased pass@k."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fspo.mcore.startup import start
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.rollout.engine import RolloutEngine
from megatron_fspo.trainer.parts import build_engine, load_model
from megatron_fspo.trainer.prepare import Inputs
from megatron_fspo.trainer.sampling import Graded, ask, collect_and_grade
from megatron_fspo.types import SamplingParams

# Evaluation has streams of its own: the same before and after training, never those of a rollout.
_SEED_OFFSET = 1_000_003


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Accuracy, and what it was made of."""

    metrics: dict[str, float]
    """``val/<file>/mean@k``, ``val/<file>/pass@j`` for j = 1, 2, 4, … k, and the mean response length."""
    responses: list[dict[str, Any]]
    """The first ``log.responses``: prompt, response, answer, reward, token ids and their log-probs."""


def evaluate(
    inputs: Inputs,
    engine: RolloutEngine,
    groups: ParallelGroups,
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Sample ``evaluation.samples`` responses per validation prompt and grade them. Collective."""
    config = inputs.config
    assert config.data.validation is not None
    k = config.evaluation.samples
    params = SamplingParams(
        n=k,
        temperature=config.evaluation.temperature,
        top_p=config.evaluation.top_p,
        max_tokens=config.rollout.max_response_tokens,
        stop_token_ids=inputs.stop_token_ids,
        seed=config.run.seed + _SEED_OFFSET,
    )
    batch = ask(engine, groups, inputs.validation, params)
    graded = collect_and_grade(inputs, groups, batch, progress)
    rewards = [row for _, _, row in graded]
    lengths = [len(completion.token_ids) for _, row, _ in graded for completion in row]
    name = f"val/{config.data.validation.stem}"
    metrics = {
        f"{name}/mean@{k}": sum(map(sum, rewards)) / (k * len(rewards)),
        f"{name}/response_length/mean": sum(lengths) / len(lengths),
    }
    for j in [2**i for i in range(k.bit_length()) if 2**i <= k]:
        metrics[f"{name}/pass@{j}"] = sum(pass_at(j, row) for row in rewards) / len(rewards)
    return Evaluation(metrics=metrics, responses=_responses(inputs, graded))


def _responses(inputs: Inputs, graded: Sequence[Graded]) -> list[dict[str, Any]]:
    """One response per prompt first, then the second of each, and so on."""
    rows = [
        {
            "prompt": prompt.text,
            "response": inputs.tokenizer.decode(completion.token_ids),
            "answer": prompt.answer,
            "reward": reward,
            "finish_reason": completion.finish_reason,
            "weight_version": completion.weight_version,
            "prompt_token_ids": prompt.token_ids,
            "token_ids": completion.token_ids,
            "log_probs": completion.log_probs,
        }
        for number in range(inputs.config.evaluation.samples)
        for prompt, (_, completions, rewards) in zip(inputs.validation, graded, strict=True)
        for completion, reward in [(completions[number], rewards[number])]
    ]
    return rows[: inputs.config.log.responses]


def evaluate_checkpoint(inputs: Inputs) -> dict[str, float]:
    """Start the process groups, load ``model.checkpoint`` and evaluate it. Collective."""
    config = inputs.config
    groups = start(inputs.backend, parallel=config.parallel, seed=config.run.seed)
    engine = build_engine(inputs, load_model(inputs, groups))
    engine.update_weights(0)
    try:
        return evaluate(inputs, engine, groups).metrics
    finally:
        engine.close()


def pass_at(k: int, rewards: Sequence[float]) -> float:
    """Probability that k of the n responses, drawn without replacement, hold a right one (reward ≥ 1).

    1 - C(n - c, k) / C(n, k) with c right ones (Chen et al. 2021, arXiv 2107.03374).
    """
    n, right = len(rewards), sum(reward >= 1 for reward in rewards)
    return 1 - math.comb(n - right, k) / math.comb(n, k)
