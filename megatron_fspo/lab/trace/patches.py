"""Functions that a dispatch mode does not see, replaced while a trace is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from megatron_fspo.lab.trace.calls import Calls
from megatron_fspo.lab.trace.memory import Memory
from megatron_fspo.lab.trace.record import Trace, Wait

_WAITS = (torch.cuda.Stream, torch.cuda.Event)


class Seen(Protocol):
    """A :class:`~megatron_fspo.lab.trace.watch.Watch`."""

    memory: Memory
    calls: Calls
    trace: Trace

    def sync(self, kind: str) -> None: ...

    def host_values(self, tensor: Tensor) -> Tensor: ...


@contextmanager
def replaced(watch: Seen) -> Iterator[None]:
    """Replace functions of torch that know of no fake tensors, or that wait for the device."""
    resize, address, make = torch.UntypedStorage.resize_, torch.UntypedStorage.data_ptr, torch.tensor

    def tolist(tensor: Tensor) -> Any:
        watch.sync("tolist")
        values = watch.host_values(tensor)
        with _disable_current_modes():
            return values.tolist()

    def tensor(data: Any, **kwargs: Any) -> Tensor:
        read = tree_map(lambda leaf: leaf.item() if isinstance(leaf, FakeTensor) else leaf, data)
        return make(read, **kwargs)

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        watch.memory.resized(storage, size)
        return resize(storage, size)

    def get_address(storage: torch.UntypedStorage) -> int:
        # Fake storages have none; programs ask whether two are the same.
        return storage._cdata if storage.device.type == "meta" else address(storage)

    def synchronize(*_: Any, **__: Any) -> None:
        watch.trace.events.append(Wait(None))
        watch.sync("synchronize")

    new: list[tuple[Any, str, Any]] = [
        (FakeTensor, "tolist", tolist),
        (torch, "tensor", tensor),
        (torch.nn.Module, "_apply", _apply),
        (torch.UntypedStorage, "resize_", resized),
        (torch.UntypedStorage, "data_ptr", get_address),
        (dist, "all_gather_object", watch.calls.gather_objects),
        (dist, "broadcast_object_list", watch.calls.broadcast_objects),
        (torch.cuda, "synchronize", synchronize),
        *((holder, "synchronize", lambda *_, **__: watch.sync("synchronize")) for holder in _WAITS),
    ]
    before = [(holder, name, getattr(holder, name)) for holder, name, _ in new]
    for holder, name, function in new:
        setattr(holder, name, function)
    try:
        yield
    finally:
        for holder, name, function in before:
            setattr(holder, name, function)


def _apply(module: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:
    """Do as ``Module._apply``, without swapping tensors, which fake ones do not allow."""
    for child in module.children() if recurse else ():
        child._apply(function)  # type: ignore[no-untyped-call]
    held: dict[str, Any]
    for held in (module._parameters, module._buffers):
        for name, tensor in held.items():
            if tensor is None or (new := function(tensor)) is tensor:
                continue
            if isinstance(tensor, torch.nn.Parameter):
                new = torch.nn.Parameter(new.detach(), tensor.requires_grad)
                new.__dict__.update({key: v for key, v in vars(tensor).items() if key not in vars(new)})
            held[name] = new
    return module
