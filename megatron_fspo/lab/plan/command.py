"""``megatron-fspo plan``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace

from megatron_fspo.config import Config
from megatron_fspo.errors import InputError
from megatron_fspo.lab.plan.advice import single_changes
from megatron_fspo.lab.plan.presets import find_model
from megatron_fspo.lab.plan.report import Given, make_report
from megatron_fspo.lab.plan.speed import Machine
from megatron_fspo.lab.plan.table import as_json, as_text


def plan(config: Config, given: Given, *, model: str | None, use_json: bool) -> tuple[str, bool]:
    """What to print, and whether the run fits.

    Args:
        model: a preset or a folder; None: the run's checkpoint.

    Raises:
        InputError: no such model, or the model cannot be spread like this.
    """
    arch = find_model(model or str(config.model.checkpoint))
    report = make_report(config, arch, given)
    changes = single_changes(config, arch, given) if report.problems else []
    text = json.dumps(as_json(report, changes)) if use_json else as_text(report, changes)
    return text, not report.problems


def assumed(words: Sequence[str]) -> Machine:
    """The defaults of :class:`~megatron_fspo.lab.plan.speed.Machine` with some ``name=value`` in their place.

    Raises:
        InputError: no such name, or no positive number.
    """
    names = {one.name: one.default for one in fields(Machine)}
    values = {}
    for word in words:
        name, _, text = word.partition("=")
        name = name.replace("-", "_")
        if name not in names:
            raise InputError(f"--assume {word}: no such assumption; there are {', '.join(names)}")
        try:
            value = float(text)
        except ValueError:
            raise InputError(f"--assume {word}: not name=number") from None
        if not 0 < value < float("inf"):
            raise InputError(f"--assume {word}: must be a positive number")
        values[name] = int(value) if isinstance(names[name], int) else value
    return replace(Machine(), **values)  # type: ignore[arg-type]
