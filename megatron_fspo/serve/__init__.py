"""Starts vLLM with the flags that this trainer needs, watches it, and leaves no process behind."""

from megatron_fspo.serve.flags import ServerOptions
from megatron_fspo.serve.process import ServerProcess
from megatron_fspo.serve.several import gpu_numbers, place, supervise_all

__all__ = ["ServerOptions", "ServerProcess", "gpu_numbers", "place", "supervise_all"]
