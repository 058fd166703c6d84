"""Steps that teach nothing: no two responses to a prompt have different rewards. Told, and at last an error.

Most often the reward is to blame: one that wants the bare answer, of a policy that explains it, gives 0 to
everything, for days.
"""

from __future__ import annotations

from megatron_fspo.errors import RewardError
from megatron_fspo.job.folder import newest_checkpoint
from megatron_fspo.parallel.metrics import agreed
from megatron_fspo.trainer.build import Training
from megatron_fspo.trainer.prepare import Inputs
from megatron_fspo.trainer.rollout import Rollout
from megatron_fspo.trainer.sampling import response_text

_SHOWN = 3
_CHARACTERS = 80
"""Of a text in a message."""


def check_spread(run: Training, sampled: Rollout) -> None:
    """Tell of a step without spread, with a few responses. Collective.

    Args:
        sampled: all responses of the step, those included that dynamic sampling left out.

    Raises:
        RewardError: it is one too many in a row (``reward.max_steps_without_spread``); on every rank.
    """
    if sampled.spread.any():
        return
    count = 1 + agreed(run.log.steps_without_spread(), run.groups)
    options = run.inputs.config.reward
    lowest, highest = sampled.rewards.min().item(), sampled.rewards.max().item()
    if lowest == highest:
        what = f"all {len(sampled)} rewards are {lowest:g}"
    else:
        what = f"no two of a prompt's {sampled.samples} rewards differ (they are {lowest:g} to {highest:g})"
    text = f"step {run.step + 1}: {what}: nothing to learn from (steps in a row: {count})"
    run.log.warn("rewards without spread", "\n  ".join([text, *shown(run.inputs, sampled)]))
    limit = options.max_steps_without_spread
    if limit and count >= limit:
        good = newest_checkpoint(run.inputs.config, step=run.step + 1 - count)
        before = f"{good} is from before them: to go on from it, remove those after it" if good else ""
        raise RewardError(
            f"reward {options.name!r}: {what}, and {count} steps in a row had nothing to learn from "
            f"(reward.max_steps_without_spread = {limit}; 0: never an error). "
            f"{before or 'No checkpoint is from before them'}"
        )


def shown(inputs: Inputs, rollout: Rollout) -> list[str]:
    """A line for each of a few responses that this rank holds, of as many prompts as there are."""
    numbers = sorted(rollout.held, key=lambda number: (number % rollout.samples, number))[:_SHOWN]
    return [
        f"prompt {prompt.index} {_short(prompt.text)}: response {_short(text)}, "
        f"answer {_short(prompt.answer)}, reward {rollout.rewards[number]:g}"
        for number in numbers
        for prompt in [rollout.prompts[number // rollout.samples]]
        for text in [response_text(inputs, rollout.held[number])]
    ]


def _short(text: str) -> str:
    """On one line, with its beginning and its end, where an answer is."""
    half = _CHARACTERS // 2
    return repr(text if len(text) <= _CHARACTERS else f"{text[:half]} … {text[-half:]}")
