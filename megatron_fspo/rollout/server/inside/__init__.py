"""The code that runs inside vLLM: new weights while it serves, checksums of what it has, a guard.

Of this package it imports ``errors`` and ``rollout``'s ``common``, ``links`` and ``checksum``: torch only.

vLLM finds :func:`register` through the entry point ``vllm.general_plugins`` of this package, which its
environment has without dependencies (``pip install --no-deps``). ``--weight-transfer-config
'{"backend": "gloo"}'`` then selects one: ``gloo`` and ``torch_nccl`` broadcast from the trainer, ``disk``
reads files. (vLLM's own ``nccl`` needs vLLM on the trainer's side, too.)
"""


def register() -> None:
    """Make the backends known to vLLM. It calls this in every one of its processes, maybe more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    names = {"gloo": "GlooTransfer", "torch_nccl": "NCCLTransfer", "disk": "DiskTransfer"}
    for backend, name in names.items():
        if backend not in Factory._registry:
            Factory.register_engine(backend, "megatron_fspo.rollout.server.inside.transfer", name)
