"""The schedule of the learning rate."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_fspo.config import Optimizer
from megatron_fspo.mcore.model.policy import _learning_rates


def rates(schedule: Optimizer, steps: int, done: int = 0) -> list[float]:
    """Of the optimizer steps after the first ``done``."""
    optimizer: Any = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = _learning_rates(optimizer, schedule)
    scheduler.step(increment=done)
    found = []
    for _ in range(steps - done):
        scheduler.step(increment=1)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def expected(schedule: Optimizer, total: int, step: int) -> float:
    """The definition, for optimizer step 1, 2, …"""
    if step <= schedule.warmup_steps:
        return schedule.lr * step / schedule.warmup_steps
    done = min(1, (step - schedule.warmup_steps) / (total - schedule.warmup_steps))
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    lowest = 0.0 if schedule.lr_decay == "constant" else schedule.lr_min
    return lowest + (schedule.lr - lowest) * left[schedule.lr_decay]


@given(
    decay=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 6),
    after=st.integers(1, 20),
    lowest=st.sampled_from([0.0, 1e-4]),
    data=st.data(),
)
def test_rates_are_as_defined_and_the_same_after_a_resume(
    decay: Any, warmup: int, after: int, lowest: float, data: st.DataObject
) -> None:
    total = warmup + after
    schedule = Optimizer(lr=1e-3, warmup_steps=warmup, lr_decay=decay, lr_min=lowest).over(total)
    found = rates(schedule, total + 3)
    assert found == pytest.approx([expected(schedule, total, step + 1) for step in range(total + 3)])
    done = data.draw(st.integers(0, total))
    assert rates(schedule, total + 3, done) == found[done:]


def test_a_run_that_ends_in_its_warm_up_comes_to_no_decay() -> None:
    schedule = Optimizer(lr=1e-3, warmup_steps=4, lr_decay="linear").over(3)
    assert rates(schedule, 3) == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3])
    assert Optimizer(lr_decay_steps=7).over(100).lr_decay_steps == 7  # what is given stays


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"lr": 1e-4, "lr_min": 1e-3}, "lr_min = 0.001 .* lr = 0.0001"),
        ({"warmup_steps": 5, "lr_decay_steps": 5}, "warmup_steps = 5"),
    ],
)
def test_schedules_that_make_no_sense(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        Optimizer(**keys)
