"""Accuracy on the validation prompts: mean@k and the unbiased pass@k."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fspo.mcore.startup import start
from megatron_fspo.parallel.groups import ParallelGroups
from megatron_fspo.parallel.metrics import gather_lists
from megatron_fspo.rollout.engine import RolloutEngine
from megatron_fspo.trainer.parts import build_engine, load_model
from megatron_fspo.trainer.prepare import Inputs
from megatron_fspo.trainer.rollout import Rollout
from megatron_fspo.trainer.same import prove_same
from megatron_fspo.trainer.sampling import ask, collect_and_grade, is_first_of_copy
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
    found = collect_and_grade(inputs, groups, batch, progress)
    rewards = found.rewards.view(-1, k).tolist()
    lengths = found.lengths.tolist()
    name = f"val/{'+'.join(dict.fromkeys(prompt.dataset for prompt in inputs.validation))}"
    metrics = {
        f"{name}/mean@{k}": sum(map(sum, rewards)) / (k * len(rewards)),
        f"{name}/response_length/mean": sum(lengths) / len(lengths),
    }
    for j in [2**i for i in range(k.bit_length()) if 2**i <= k]:
        metrics[f"{name}/pass@{j}"] = sum(pass_at(j, row) for row in rewards) / len(rewards)
    return Evaluation(metrics=metrics, responses=_responses(inputs, groups, found))


def _responses(inputs: Inputs, groups: ParallelGroups, found: Rollout) -> list[dict[str, Any]]:
    """One response per prompt first, then the second of each, and so on; on the first rank. Collective."""
    numbers = [
        position * found.samples + number
        for number in range(found.samples)
        for position in range(len(found.prompts))
    ][: inputs.config.log.responses]
    if not is_first_of_copy(groups):
        return []
    mine = [(number, found.held[number]) for number in numbers if number in found.held]
    completions = dict(gather_lists(mine, group=groups.dp))
    return [
        {
            "prompt": prompt.text,
            "response": inputs.tokenizer.decode(list(completion.token_ids)),
            "answer": prompt.answer,
            "reward": found.rewards[number].item(),
            "finish_reason": completion.finish_reason,
            "weight_version": completion.weight_version,
            "prompt_token_ids": prompt.token_ids,
            "token_ids": list(completion.token_ids),
            "log_probs": list(completion.log_probs),
        }
        for number in numbers
        for prompt, completion in [(found.prompts[number // found.samples], completions[number])]
    ]


def evaluate_checkpoint(inputs: Inputs) -> dict[str, float]:
    """Start the process groups, load ``model.checkpoint`` and evaluate it. Collective."""
    config = inputs.config
    groups = start(inputs.backend, parallel=config.parallel, seed=config.run.seed)
    prove_same(inputs)
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
