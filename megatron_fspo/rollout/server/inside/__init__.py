"""Code that runs inside vLLM: weight updates, checksums of weights, routes, and the check of the API key.

Of this package it imports only ``errors``, ``parallel.buckets`` and ``common``, ``links``, ``checksum`` and
``delta`` of ``rollout``, which need torch only. vLLM's environment has this package without its dependencies.

vLLM calls :func:`register` through the entry point ``vllm.general_plugins``. ``--weight-transfer-config
'{"backend": "gloo"}'`` then selects a backend: ``gloo`` and ``torch_nccl`` broadcast from the trainer,
``disk`` reads files. (vLLM's own ``nccl`` needs vLLM on the trainer's side too.)
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch


def register() -> None:
    """Register the backends. vLLM calls this in each of its processes, possibly more than once."""
    from vllm.config import VllmConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
    from vllm.platforms import current_platform

    names = {"gloo": "GlooTransfer", "torch_nccl": "NCCLTransfer", "disk": "DiskTransfer"}
    for backend, name in names.items():
        if backend not in Factory._registry:
            Factory.register_engine(backend, "megatron_fspo.rollout.server.inside.transfer", name)
    if current_platform.is_cpu():
        verify = VllmConfig._verify_aux_output_compatibility

        def verify_others(config: Any) -> None:
            # Out-of-tree platforms have their own model runners, so vLLM accepts them; ours is cpu_routes.
            with patch.object(type(current_platform), "is_out_of_tree", lambda _: True):
                verify(config)

        VllmConfig._verify_aux_output_compatibility = verify_others
