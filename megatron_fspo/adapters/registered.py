"""Tells why a trainer that finds its plugins by itself has not found FSPO. It imports that trainer."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os


def verl_problem() -> str | None:
    """Why verl, as it is installed here, has no policy loss ``fspo``; None if it has.

    verl reports a plugin that fails to load on its DEBUG log only, and then that the loss mode is not
    supported.
    """
    if importlib.util.find_spec("verl") is None:
        return "verl is not installed in this environment"
    registry = importlib.import_module("verl.trainer.ppo.core_algos").POLICY_LOSS_REGISTRY
    if "fspo" in registry:
        return None
    allowed = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    entry_points = importlib.metadata.entry_points(group="verl.plugins", name="megatron_fspo")
    if not entry_points:
        return "megatron_fspo is installed without its entry point: pip install --no-deps -e ."
    if allowed != "auto" and "megatron_fspo" not in allowed.split(","):
        return f"VERL_USE_EXTERNAL_PLUGINS={allowed} leaves megatron_fspo out"
    try:
        next(iter(entry_points)).load()
    except Exception as error:
        return f"megatron_fspo does not load: {error!r}"
    return "megatron_fspo loads now, but did not when verl was imported"
