"""Starts vLLM with the flags that this trainer needs, watches it, and leaves no process behind."""

from megatron_fspo.serve.flags import ServerOptions
from megatron_fspo.serve.process import ServerProcess
from megatron_fspo.serve.supervise import supervise

__all__ = ["ServerOptions", "ServerProcess", "supervise"]
