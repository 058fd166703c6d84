"""A run from a Python program or notebook."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_fspo.config.loading import load_config
from megatron_fspo.errors import InputError
from megatron_fspo.rewards import Reward
from megatron_fspo.rewards.registry import set_reward


class Trainer:
    """A run in this process or, in a program that torchrun starts, on every rank.

    Example::

        def short(prompt, completion, response):
            return float(response.startswith(prompt.answer)) / len(response)

        rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+3=", "answer": "5"}]
        trainer = Trainer("run.toml", reward=short, prompts=rows, run={"steps": 20}, optimizer={"lr": 1e-5})
        folder = trainer.train()

    Args:
        config: TOML file, or sections and their keys.
        reward: function of prompt, completion and response, or functions and their weights. They run in the
            trainer's process, so none can be interrupted; without, ``reward.name`` of the configuration.
        prompts: rows with the fields of a data file; without, ``data.train``.
        sections: keys that override those of ``config``.

    Raises:
        InputError: the configuration is wrong, or two functions have one name.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any],
        *,
        reward: Reward | Mapping[Reward, float] | None = None,
        prompts: Iterable[Mapping[str, Any]] | None = None,
        **sections: Mapping[str, Any],
    ) -> None:
        changes = {section: dict(keys) for section, keys in sections.items()}
        if reward is not None:
            changes["reward"] = _register(reward)
        rows = None if prompts is None else "".join(f"{json.dumps(dict(row))}\n" for row in prompts)
        if rows is not None:
            changes.setdefault("data", {})["train"] = "prompts.jsonl"
        self.config = load_config([config if isinstance(config, Mapping) else Path(config), changes])
        """The checked :class:`~megatron_fspo.config.Config`."""
        if rows is not None:
            # Beside the run's folder, which a new run must not have.
            file = self.config.run_folder.with_name(f"{self.config.run.name}.prompts.jsonl")
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_name(f"{file.name}.{os.getpid()}")  # every rank writes the same
            partial.write_text(rows, encoding="utf-8")
            partial.replace(file)
            data = self.config.data.model_copy(update={"train": file})
            self.config = self.config.model_copy(update={"data": data})

    def train(self, *, resume: bool = False) -> Path:
        """Train to the last step, or until SIGTERM, and return the run's folder, at the end with ``hf/``.
        Raises what :func:`megatron_fspo.trainer.loop.train` raises."""
        from megatron_fspo.mcore import leave_uncompiled

        leave_uncompiled()
        from megatron_fspo.mcore.machine.startup import job
        from megatron_fspo.trainer.loop import train
        from megatron_fspo.trainer.prepare import prepare

        how: Any = "auto" if resume else "no"
        with job():
            inputs = prepare(self.config, world_size=int(os.environ.get("WORLD_SIZE", "1")))
            train(inputs, resume=how)
        return self.config.run_folder


def _register(reward: Reward | Mapping[Reward, float]) -> dict[str, Any]:
    """Return the keys of ``[reward]`` for functions of this process."""
    weights = dict(reward) if isinstance(reward, Mapping) else {reward: 1.0}
    if not weights:
        raise InputError("reward: name at least one function")
    names = {function.__name__: weight for function, weight in weights.items()}
    if len(names) < len(weights):
        raise InputError(f"reward: two of the functions {', '.join(names)} have one name")
    for function in weights:
        set_reward(function.__name__, function)
    first, *others = names
    also = {name: names[name] for name in others}
    return {"name": first, "weight": names[first], "also": also, "in_process": True}
