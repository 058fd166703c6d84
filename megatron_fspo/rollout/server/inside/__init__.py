"""The code that runs inside vLLM: new weights while it serves, checksums of what it has, routes, a guard.

Of this package it imports ``errors`` and, of ``rollout``, ``common``, ``links``, ``checksum`` and ``delta``:
torch only.

vLLM finds :func:`register` through the entry point ``vllm.general_plugins`` of this package, which its
environment has without dependencies (``pip install --no-deps``). ``--weight-transfer-config
'{"backend": "gloo"}'`` then selects one: ``gloo`` and ``torch_nccl`` broadcast from the trainer, ``disk``
reads files. (vLLM's own ``nccl`` needs vLLM on the trainer's side, too.)
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch


def register() -> None:
    """Make the backends known to vLLM. It calls this in every one of its processes, maybe more than once."""
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
            # As on platforms with model runners of their own: ours is cpu_routes.
            with patch.object(type(current_platform), "is_out_of_tree", lambda _: True):
                verify(config)

        VllmConfig._verify_aux_output_compatibility = verify_others
