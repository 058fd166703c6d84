"""The configuration of a run: every key, its default, what is legal, and how a file becomes a checked object.

:mod:`.schema` has the whole, :mod:`.sections` the sections; those with variants or much to say have a file
each; :mod:`.loading` reads TOML and command-line words.
"""

from megatron_fspo.config.data import DataSet
from megatron_fspo.config.reward import Reward
from megatron_fspo.config.schema import Config
from megatron_fspo.config.sections import VLLM, Batch, Log, Optimizer, Parallel

__all__ = ["VLLM", "Batch", "Config", "DataSet", "Log", "Optimizer", "Parallel", "Reward"]
