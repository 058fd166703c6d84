"""The configuration of a run: all keys, their defaults and legal values.

:mod:`.schema` has the whole configuration, :mod:`.sections` the plain sections, and the other modules one
section each. :mod:`.loading` reads TOML files and command-line overrides.
"""

from megatron_fspo.config.data import DataSet
from megatron_fspo.config.reward import Reward
from megatron_fspo.config.schema import Config
from megatron_fspo.config.sections import VLLM, Batch, Log, Optimizer, Parallel

__all__ = ["VLLM", "Batch", "Config", "DataSet", "Log", "Optimizer", "Parallel", "Reward"]
