"""The configuration of a run: every key, its default, what is legal, and how a file becomes a checked object.

:mod:`.schema` has the sections, :mod:`.losses`, :mod:`.correction` and :mod:`.fp8` those with variants or
rules of their own; :mod:`.loading` reads TOML and command-line words.
"""

from megatron_fspo.config.schema import (
    VLLM,
    Batch,
    Checkpoint,
    Config,
    Data,
    Evaluation,
    Log,
    Model,
    Optimizer,
    Parallel,
    Reward,
    Rollout,
    Run,
)

__all__ = [
    "VLLM",
    "Batch",
    "Checkpoint",
    "Config",
    "Data",
    "Evaluation",
    "Log",
    "Model",
    "Optimizer",
    "Parallel",
    "Reward",
    "Rollout",
    "Run",
]
