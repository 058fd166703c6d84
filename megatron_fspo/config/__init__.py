"""The configuration of a run: every key, its default, what is legal, and how a file becomes a checked object.

:mod:`.schema` has the whole; sections with variants or rules of their own have a file each; :mod:`.loading`
reads TOML and command-line words.
"""

from megatron_fspo.config.checkpoint import Checkpoint
from megatron_fspo.config.data import Data, DataSet
from megatron_fspo.config.evaluation import Evaluation
from megatron_fspo.config.log import Log
from megatron_fspo.config.reward import Reward
from megatron_fspo.config.schema import (
    VLLM,
    Batch,
    Config,
    Model,
    Optimizer,
    Parallel,
    Rollout,
    Run,
)

__all__ = [
    "VLLM",
    "Batch",
    "Checkpoint",
    "Config",
    "Data",
    "DataSet",
    "Evaluation",
    "Log",
    "Model",
    "Optimizer",
    "Parallel",
    "Reward",
    "Rollout",
    "Run",
]
