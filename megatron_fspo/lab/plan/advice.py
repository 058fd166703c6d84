"""One change to a run that makes it fit."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from megatron_fspo.config import Config
from megatron_fspo.errors import InputError
from megatron_fspo.lab.plan.plan import Given, Plan, make_plan
from megatron_fspo.packing.batch import padded_length
from megatron_fspo.weights import Architecture


@dataclass(frozen=True, kw_only=True)
class SingleChange:
    """One change to a run, and the plan that it gives."""

    text: str
    plan: Plan


def single_changes(config: Config, arch: Architecture, given: Given) -> list[SingleChange]:
    """Every change that is tried and legal. Those that fit come first, the fastest by estimate before others;
    then those that do not, the smallest first."""
    changes = []
    for text, keys, world in _tried(config, given):
        try:
            plan = make_plan(_changed(config, keys), arch, replace(given, world=world))
        except (ValidationError, InputError):
            continue
        changes.append(SingleChange(text=text, plan=plan))

    def rank(change: SingleChange) -> tuple[bool, float]:
        plan = change.plan
        return bool(plan.problems), plan.worst.total if plan.problems else plan.seconds

    return sorted(changes, key=rank)


def _tried(config: Config, given: Given) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Yields each change in words, as keys, and its number of ranks."""
    parallel, world = config.parallel, given.world
    changes: list[dict[str, Any]] = []
    if not parallel.distributed_optimizer:
        changes.append({"parallel.distributed_optimizer": True})
    if parallel.tensor > 1 and not parallel.sequence:
        changes.append({"parallel.sequence": True})
    if config.model.recompute == "none":
        changes.append({"model.recompute": "full"})
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    shortest = padded_length(longest, parallel.context)
    changes += [
        {"batch.max_tokens": size}
        for size in sorted({config.batch.max_tokens // 2, shortest})
        if shortest <= size < config.batch.max_tokens
    ]
    if config.rollout.engine == "embedded":
        changes += [{"rollout.max_batch": config.rollout.max_batch // n} for n in (2, 4, 8)]
    changes.append({"parallel.tensor": 2 * parallel.tensor, "parallel.sequence": True})
    changes += [
        {f"parallel.{name}": 2 * getattr(parallel, name)} for name in ("pipeline", "context", "expert")
    ]
    for keys in changes:
        yield ", ".join(f"{key} = {_toml(value)}" for key, value in keys.items()), keys, world
    for more in (2, 4):
        yield f"{more * world} ranks that train", {}, more * world


def _changed(config: Config, keys: dict[str, Any]) -> Config:
    tree = deepcopy(config.model_dump())
    for key, value in keys.items():
        section, _, name = key.partition(".")
        tree[section][name] = value
    return Config.model_validate(tree)


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()
