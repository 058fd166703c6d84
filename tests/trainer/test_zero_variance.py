"""Steps whose rewards teach nothing: how they are counted, told and ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fspo.errors import RewardError
from megatron_fspo.record.log import RunLog
from megatron_fspo.trainer.advantages import check_variance
from megatron_fspo.trainer.rollout import Rollout
from megatron_fspo.types import Prompt
from mismatch_cases import ALONE, as_rollout, sample
from test_log import logged

TEXTS = {1: "yes", 2: "n\no", 3: "long " * 100 + "end"}


def rollout(rewards: list[list[float]]) -> Rollout:
    """Two responses to each prompt, which say the texts in turn; advantages as leave-one-out has them."""
    samples = []
    for group, row in enumerate(rewards):
        prompt = Prompt(index=10 + group, token_ids=(1,), text=f"^{group}", answer=f"a{group}")
        for number, reward in enumerate(row):
            one = sample(0, [-1.0, -1.0], token_ids=(1 + (2 * group + number) % 3, 9))
            samples.append(
                replace(one, prompt=prompt, number=number, reward=reward, advantage=reward - row[1 - number])
            )
    return as_rollout(samples, per_prompt=2)


class Run:
    """As much of a run as the check looks at."""

    def __init__(self, folder: Path, limit: int) -> None:
        config = logged(folder)
        reward = config.reward.model_copy(update={"max_zero_variance_steps": limit})
        self.inputs: Any = SimpleNamespace(
            config=config.model_copy(update={"reward": reward}),
            stop_token_ids=(9,),
            decode=lambda ids: TEXTS[ids[0]],
        )
        self.groups: Any = SimpleNamespace(dp_cp=ALONE, tp=ALONE, pp=ALONE)
        self.log = RunLog(config, writer=True, resume_step=None)
        self.step = 0

    def check(self, sampled: Rollout) -> None:
        check_variance(sampled, self.inputs, self.groups, self.log, self.step + 1)

    def learn(self, rewards: list[list[float]]) -> None:
        """A step on these rewards."""
        sampled = rollout(rewards)
        self.check(sampled)
        self.step += 1
        self.log.step(
            self.step, {"critic/zero_variance_groups": 1 - sampled.has_variance.double().mean().item()}
        )


FLAT, VARIED = [[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 1.0]]


def test_a_zero_variance_step_is_told_with_three_responses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, limit=10)
    run.learn([[0.25, 0.25], [0.5, 0.5], [0.0, 0.0], [0.25, 0.25]])
    assert capsys.readouterr().out.splitlines()[:-1] == [
        "step 1: no two of a prompt's 2 rewards differ (they are 0 to 0.5): nothing to learn from "
        "(steps in a row: 1)",
        "  prompt 10 '^0': response 'yes', answer 'a0', reward 0.25",
        f"  prompt 11 '^1': response '{'long ' * 8} … g {'long ' * 7}end', answer 'a1', reward 0.5",
        "  prompt 12 '^2': response 'n\\no', answer 'a2', reward 0",
    ]


def test_only_steps_in_a_row_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path, limit=3)
    for rewards in (FLAT, FLAT, VARIED, FLAT, FLAT):
        run.learn(rewards)
    assert "prompt" not in capsys.readouterr().out.split("step    3/300")[1].split("step 4: all")[0]
    with pytest.raises(RewardError, match=r"all 4 rewards are 0, and 3 steps in a row .*_steps = 3;"):
        run.learn(FLAT)


def test_a_penalty_stops_no_count_and_a_teacher_does(tmp_path: Path) -> None:
    """A small KL to the first model teaches nothing where rewards do not."""
    run, config = Run(tmp_path, limit=1), logged(tmp_path)
    reward, penalty = run.inputs.config.reward, config.loss.model_copy(update={"kl_coef": 0.001})
    run.inputs.config = config.model_copy(update={"reward": reward, "loss": penalty})
    with pytest.raises(RewardError, match="1 steps in a row"):
        run.check(rollout(FLAT))
    teacher = config.teacher.model_copy(update={"urls": ("http://t",)})
    run.inputs.config = run.inputs.config.model_copy(update={"teacher": teacher})
    run.check(rollout(FLAT))


def test_the_count_is_of_the_log(tmp_path: Path) -> None:
    """A run that resumes keeps its rows up to there, and so its count."""
    run = Run(tmp_path, limit=3)
    run.log.step(0, {"val/x": 1.0})  # an evaluation before the first step is no step
    run.learn(FLAT)
    run.learn(FLAT)
    assert run.log.zero_variance_steps() == 2
    run.log = RunLog(run.inputs.config, writer=True, resume_step=1)
    assert run.log.zero_variance_steps() == 1
    assert RunLog(run.inputs.config, writer=False, resume_step=1).zero_variance_steps() == 0


def test_the_error_names_the_checkpoint_from_before(tmp_path: Path) -> None:
    run = Run(tmp_path, limit=2)
    run.learn(VARIED)
    for step in (1, 2):
        (run.inputs.config.run_folder / f"checkpoints/step_{step:06d}").mkdir(parents=True)
    run.learn(FLAT)
    with pytest.raises(RewardError, match="checkpoints/step_000001 is from before"):
        run.learn(FLAT)


def test_rewards_that_differ_are_not_said_to_be_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, limit=0)
    sampled = rollout([[0.0, 1.0], [1.0, 0.0]])
    flat = replace(sampled, advantages=torch.zeros(4), truncated=torch.tensor([True, True, True, False]))
    run.check(flat)
    (line, *_) = capsys.readouterr().out.splitlines()
    assert "all advantages are 0: 3 of 4 responses are cut, and reward.truncated = keep" in line
