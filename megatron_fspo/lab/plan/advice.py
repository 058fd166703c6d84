"""One change to a run that makes it fit."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from megatron_fspo.config import Config
from megatron_fspo.errors import InputError
from megatron_fspo.lab.plan.report import Given, Report, make_report
from megatron_fspo.packing.batch import padded_length
from megatron_fspo.weights import Architecture


@dataclass(frozen=True, kw_only=True)
class Change:
    """What it is, and what becomes of the run."""

    text: str
    report: Report


def single_changes(config: Config, arch: Architecture, given: Given) -> list[Change]:
    """Every change that is tried and legal. Those that fit come first, the fastest by estimate before others;
    then those that do not, the smallest first."""
    found = []
    for text, keys, world in _tried(config, given):
        try:
            changed = _changed(config, keys)
            report = make_report(changed, arch, replace(given, world=world))
        except (ValidationError, InputError):
            continue
        found.append(Change(text=text, report=report))
    return sorted(found, key=_rank)


def _rank(change: Change) -> tuple[bool, float]:
    report = change.report
    return bool(report.problems), report.worst.total if report.problems else report.seconds


def _tried(config: Config, given: Given) -> Iterator[tuple[str, dict[str, Any], int]]:
    """In words, as keys, and with how many ranks."""
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
        yield ", ".join(f"{key} = {_shown(value)}" for key, value in keys.items()), keys, world
    for more in (2, 4):
        yield f"{more * world} ranks that train", {}, more * world


def _changed(config: Config, keys: dict[str, Any]) -> Config:
    tree = deepcopy(config.model_dump())
    for key, value in keys.items():
        section, _, name = key.partition(".")
        tree[section][name] = value
    return Config.model_validate(tree)


def _shown(value: object) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f'"{value}"'
        if isinstance(value, str)
        else f"{value}"
    )
