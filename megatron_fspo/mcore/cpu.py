"""Lets Megatron-Core run where there is no GPU.

Megatron writes ``device="cuda"`` in a few dozen places. On a machine without a GPU they mean the CPU: one
torch function mode says so, and a few CUDA calls get their CPU meaning. No class of Megatron is touched;
norms and attention come through the layer spec (:mod:`megatron_fspo.mcore.layers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import token_dispatcher
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class CudaMeansCpu(TorchFunctionMode):
    """Reads ``cuda`` as ``cpu`` in every torch call of this thread."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers sort parameters by the name 'torch.cuda.FloatTensor'.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        if not kwargs:  # most calls: keep them cheap
            return func(*args)
        named = dict(kwargs)
        if named.get("pin_memory"):
            named["pin_memory"] = False
        if _is_cuda(named.get("device")):
            named["device"] = CPU
        return func(*args, **named)


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


_mode: CudaMeansCpu | None = None


def install() -> None:
    """Make ``cuda`` mean ``cpu`` for the rest of this process. Calling it again does nothing."""
    global _mode
    if _mode is not None:
        return
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
    _mode = CudaMeansCpu()
    _mode.__enter__()
