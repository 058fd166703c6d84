"""The page for those who come from TRL names settings and metrics that TRL has."""

from __future__ import annotations

import inspect

from peer_keys import named
from trl import GRPOConfig
from trl.trainer import grpo_trainer


def test_settings_are_in_the_config() -> None:
    arguments = {"train_dataset", "reward_funcs"}
    assert arguments <= set(inspect.signature(grpo_trainer.GRPOTrainer.__init__).parameters)
    found = set(named("Keys", "TRL"))
    assert len(found) > 20
    assert found - arguments - set(GRPOConfig.__dataclass_fields__) == set()


def test_metrics_are_logged() -> None:
    source = inspect.getsource(grpo_trainer)
    of_transformers = {"grad_norm"}
    assert {name for name in named("Metrics", "TRL") if f'"{name}"' not in source} <= of_transformers
