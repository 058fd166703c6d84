"""Lets Megatron-Core run where there is no GPU.

Megatron writes ``device="cuda"`` in a few dozen places. On a machine without a GPU they mean the CPU: torch's
factories and four methods of its tensors are patched, and a few CUDA calls get their CPU meaning. (A torch
function mode would say it in one place, but stand in the way of every call.) No class of Megatron is touched;
norms and attention come through the layer spec (:mod:`megatron_fspo.mcore.layers`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core import utils as megatron_utils
from megatron.core.optimizer import clip_grads, optimizer
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor
from torch.utils._device import _device_constructors

CPU = torch.device("cpu")
_FACTORIES = (
    *("arange", "as_tensor", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros"),
    *("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"),
)


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A factory of tensors for which ``cuda`` is ``cpu``, and whose memory is never pinned."""

    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return made


def _to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if args and _is_cuda(args[0]):
        args = (CPU, *args[1:])
    if _is_cuda(kwargs.get("device")):
        kwargs["device"] = CPU
    return _tensor_to(self, *args, **kwargs)


def _type(self: Tensor, *args: Any, **kwargs: Any) -> Any:
    name = _tensor_type(self, *args, **kwargs)
    # Megatron's optimizers sort parameters by the name 'torch.cuda.FloatTensor'.
    return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) else name


def _itself(self: Tensor, *_: Any, **__: Any) -> Tensor:
    return self


_tensor_to, _tensor_type = torch.Tensor.to, torch.Tensor.type


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class _Stream:
    """The CPU runs everything in order: waiting is over as soon as it begins."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> _Stream:
        """An event to synchronise with: the stream will do."""
        return self

    def synchronize(self) -> None: ...


def _split_sizes_as_numpy(values: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Brings what the dispatcher of experts counted to the CPU, for the collective.

    Megatron's own does so for tensors of a GPU only, and no collective takes its split sizes as a tensor.
    """
    return values.numpy() if as_numpy and isinstance(values, torch.Tensor) else values


@functools.cache
def install() -> None:
    """Make ``cuda`` mean ``cpu`` for the rest of this process. Calling it again does nothing."""
    cuda_means_cpu()
    use_torch_kernels()


def use_torch_kernels() -> None:
    """Adam, the gradient's norm and the router in torch: wherever Transformer Engine or apex is installed,
    Megatron takes theirs, which are for GPUs only."""
    megatron_optimizer.Adam, megatron_optimizer.SGD = torch.optim.AdamW, torch.optim.SGD
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = True
    for module in (clip_grads, optimizer):
        module.multi_tensor_applier = megatron_utils.local_multi_tensor_applier
        module.multi_tensor_scale_impl = megatron_utils.local_multi_tensor_scale
    clip_grads.l2_norm_impl = megatron_utils.local_multi_tensor_l2_norm
    clip_grads.multi_tensor_scale_tensor_impl = None  # of 0.19
    vars(moe_utils)["te_general_gemm"] = None  # the router's


def cuda_means_cpu() -> None:
    """The devices, streams and random states."""
    _device_constructors()  # remembers torch's own factories, for ``with torch.device("meta")``
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.to = _to  # type: ignore[assignment, method-assign]
    torch.Tensor.type = _type  # type: ignore[assignment, method-assign]
    torch.Tensor.cuda = torch.Tensor.pin_memory = _itself  # type: ignore[assignment, method-assign]
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.Stream = _Stream  # type: ignore[assignment, misc]
    torch.cuda.current_stream = _Stream  # type: ignore[assignment]
    torch.cuda.default_stream = _Stream  # type: ignore[assignment]
    torch.cuda.stream = lambda *_: nullcontext()  # type: ignore[assignment]
    token_dispatcher.maybe_move_tensor_to_cpu = _split_sizes_as_numpy
    # The tracker that does nothing: our models have no dropout, so no state of its own is needed. Recomputed
    # layers still save and restore what they take for the state of a GPU.
    megatron_random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.empty(0)
    megatron_random._set_cuda_rng_state = lambda *_, **__: None
