"""The page for those who come from verl names keys that verl's configuration has."""

from __future__ import annotations

from pathlib import Path

import verl
from omegaconf import OmegaConf
from peer_keys import named


def test_keys_are_in_the_configuration() -> None:
    folder = Path(verl.__file__).parent / "trainer/config"
    trainer = OmegaConf.load(folder / "_generated_ppo_trainer.yaml")
    megatron = OmegaConf.load(folder / "_generated_ppo_megatron_trainer.yaml")
    absent = object()
    found = named("Keys", "verl")
    assert len(found) > 20
    for key in found:
        whole = f"actor_rollout_ref.{key}" if key.startswith(("actor.", "rollout.")) else key
        config = megatron if key.startswith("actor.megatron.") else trainer
        assert OmegaConf.select(config, whole, default=absent) is not absent, key
