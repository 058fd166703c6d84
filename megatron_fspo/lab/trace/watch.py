"""What a program would ask of a GPU: memory, host syncs, copies, collectives and arithmetic, by line.

A tensor on ``cuda`` is torch's fake one: shape, dtype and device without memory. Operations on host tensors
run for real. Small tensors on the device have a value on the host beside them, worked out by the same
operations, so that masks, borders and counts are true; what comes out of large ones is all ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from megatron_fspo.lab.trace.calls import Calls
from megatron_fspo.lab.trace.memory import Memory
from megatron_fspo.lab.trace.patches import replaced
from megatron_fspo.lab.trace.record import Request, Site, Sync, Trace, here

aten = torch.ops.aten
_READS = {  # the host waits for what these return, or for its size
    *(aten.is_nonzero.default, aten.masked_select.default, aten.nonzero.default),
    *(aten._unique2.default, aten.unique_consecutive.default, aten.unique_dim.default),
}
_UNSET = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
_INDEXED = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
"""Matrix products → their factors."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation while it is entered; all of them are to run inside one ``with``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.memory = Memory(self.trace)
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._stack = ExitStack()
        self._inside_kernel = 0
        self.calls = Calls(self.memory)
        self._unfinished: dict[int, Site] = {}

    def __enter__(self) -> Watch:
        self._stack.enter_context(self._fake)
        # torch.tensor(..., device="cuda") makes it on the host and copies it, which is seen.
        torch._C._set_only_lift_cpu_tensors(True)
        self._stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        self._stack.enter_context(replaced(self))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stack.close()

    def begin(self, asked: Request) -> None:
        """Start a new trace; what is held from before counts no more."""
        self.trace = Trace()
        self.memory.begin(self.trace)
        self.calls.begin(self.trace, asked)
        self._unfinished.clear()

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Count what is seen for this phase; its peak begins with what is held."""
        before, self.trace.phase = self.trace.phase, name
        self.trace.peaks[name] = max(self.trace.peaks.get(name, 0), self.trace.live)
        try:
            yield
        finally:
            self.trace.phase = before

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is one kernel on a GPU: what it holds while it runs does not count, and what
        it returns does."""

        @functools.wraps(function)
        def launched(*args: Any, **kwargs: Any) -> Any:
            self._inside_kernel += 1
            try:
                out = function(*args, **kwargs)
            finally:
                self._inside_kernel -= 1
            if not self._inside_kernel:
                self.trace.launches[self.trace.phase] += 1
                site = here()
                # Quantised tensors are objects, or tensors, with tensors in them.
                inner = [vars(leaf) for leaf in tree_leaves(out) if hasattr(leaf, "__dict__")]
                for tensor in _device_tensors([out, *inner]):
                    self.memory.hold(tensor, site, inside_kernel=False)
            return out

        return launched

    def sync(self, kind: str) -> None:
        """Note that the host waits."""
        self._unfinished.clear()
        if not self._inside_kernel:
            self.trace.syncs[Sync(self.trace.phase, here(), kind)] += 1

    def host_values(self, tensor: Tensor) -> Tensor:
        """Return the values of a device tensor, on the host; ones where they are not known."""
        with _disable_current_modes():
            known = self.memory.values(tensor)
            return torch.ones(tensor.shape, dtype=tensor.dtype) if known is None else known.clone()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # two of three operations
            return args[0].fake_device
        kwargs = kwargs or {}
        if any(issubclass(kind, Tensor) and kind not in _PLAIN for kind in types):
            return NotImplemented  # a tensor with a dispatch of its own, whose operations come back here
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if func.namespace == "c10d":
            if len(on_device) < len(tensors):
                self._mixed(func)
            return self.calls.answer_collective(func, args, kwargs, on_device)
        made_there = torch.device(kwargs.get("device") or "cpu").type == "cuda"
        if not on_device and not made_there:
            if self._unfinished:
                self._check_finished(tensors)
            with _disable_current_modes():
                return func(*args, **kwargs)
        if on_device and (answer := self._to_host(func, args, kwargs)) is not None:
            return answer[0]
        host = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
        if host and func in (aten.copy_.default, aten._to_copy.default):
            non_blocking = kwargs.get("non_blocking", False) or (len(args) > 2 and args[2])
            with _disable_current_modes():
                asynchronous = non_blocking and host[0].is_pinned()
            if not asynchronous:
                self.sync("pageable copy")
        elif any(tensor.dim() for tensor in host) and func is not aten.set_.source_Tensor:
            self._mixed(func)
        if (answer := self._sized_by_data(func, args, kwargs)) is not None:
            return answer[0]
        out = func(*args, **kwargs)
        if not self._inside_kernel:
            self.trace.launches[self.trace.phase] += not func.is_view
            self._count_flops(func, args, kwargs, out)
        site = None
        for tensor in _device_tensors(out):
            if not self.memory.knows(tensor):
                site = site or here()
                self.memory.hold(tensor, site, inside_kernel=self._inside_kernel > 0)
        self._follow(func, args, kwargs, out)
        return out

    # Values

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Have the values of what came out of an operation, where it is small."""
        made = [tensor for tensor in _device_tensors(out) if self.memory.wants_values(tensor)]
        changed = func._schema.is_mutable
        if not made and not changed:
            return
        with _disable_current_modes():
            known = tree_map(self._on_host, (args, kwargs))
            result: Any = None
            if func.overloadpacket in _UNSET:
                pass  # ones, not what the host's memory had there before
            elif not any(value is _UNKNOWN for value in tree_leaves(known)):
                known[1].pop("pin_memory", None)
                # Not for these values, or not on a host: they are ones.
                with suppress(RuntimeError, NotImplementedError, IndexError):
                    result = func(*known[0], **known[1])
            elif changed:
                for tensor in _device_tensors(out):
                    if (values := self.memory.values(tensor)) is not None:
                        values.fill_(1)
            by_id = dict(zip(map(id, tree_leaves(out)), tree_leaves(result), strict=False))
            for tensor in filter(self.memory.wants_values, made):  # one may be a view of another
                values, worked_out = self.memory.give_values(tensor), by_id.get(id(tensor))
                if isinstance(worked_out, Tensor) and worked_out.shape == values.shape:
                    values.copy_(worked_out)

    def _on_host(self, leaf: Any) -> Any:
        if isinstance(leaf, FakeTensor):
            values = self.memory.values(leaf)
            return _UNKNOWN if values is None else values
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        return leaf

    # Between host and device

    def _to_host(self, func: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
        """Return the answer to an operation that brings values to the host; None for any other."""
        if func is aten._local_scalar_dense.default:
            self.sync("item")
            values = self.host_values(args[0])
            with _disable_current_modes():
                return (values.item(),)
        if func is aten.equal.default:
            self.sync("equal")
            return (True,)
        if func is aten._to_copy.default and kwargs.get("device") is not None:
            device = torch.device(kwargs["device"])
            if device.type != "cpu":
                return None
            asynchronous = kwargs.get("non_blocking", False) and kwargs.get("pin_memory", False)
            values = self.host_values(args[0])
            with _disable_current_modes():
                out = values.to(kwargs.get("dtype") or values.dtype)
            self._read(out, asynchronous)
            return (out,)
        if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
            non_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2])
            with _disable_current_modes():
                pinned = args[0].is_pinned()
                if (known := self.memory.values(args[1])) is not None:
                    args[0].copy_(known)
            self._read(args[0], non_blocking and pinned)
            return (args[0],)
        return None

    def _read(self, out: Tensor, asynchronous: bool) -> None:
        if asynchronous:
            self._unfinished[out.untyped_storage()._cdata] = here()
        else:
            self.sync("copy to the host")

    def _check_finished(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            begun = self._unfinished.get(tensor.untyped_storage()._cdata)
            if begun is not None:
                self.trace.early.append(f"{here()}: before the copy of {begun} was waited for")

    def _mixed(self, func: Any) -> None:
        if func in _INDEXED:  # torch brings the indices to the device
            self.sync("pageable copy")
        else:
            self.trace.mixed.append(f"{here()}: {func} was given a host tensor")
            raise RuntimeError(f"{here()}: {func} on the device was given a host tensor")

    def _sized_by_data(self, func: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
        """Return the answer to an operation whose size depends on values; None for any other."""
        if func in _READS:
            self.sync(func._schema.name.removeprefix("aten::"))
        elif func in _INDEXED:
            masks = [index for index in args[1] if index is not None and index.dtype == torch.bool]
            if not masks:
                return None
            if func is aten.index.Tensor or args[2].numel() > 1:  # else torch fills by the mask
                self.sync("boolean index")
            indices: list[Tensor | None] = []
            for index in args[1]:
                indices += self._places(index) if any(index is mask for mask in masks) else [index]
            return (self.__torch_dispatch__(func, (), (args[0], indices, *args[2:]), kwargs),)
        elif func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self.sync("repeat_interleave")
        else:
            return None
        with _disable_current_modes():
            on_host = [self._on_host(arg) for arg in args]
            host = [
                torch.ones(a.shape, dtype=a.dtype) if v is _UNKNOWN else v
                for a, v in zip(args, on_host, strict=True)
            ]
            results = func(*host, **kwargs)
        return (tree_map(lambda leaf: self._put(leaf) if isinstance(leaf, Tensor) else leaf, results),)

    def _places(self, mask: Tensor) -> list[Tensor]:
        with _disable_current_modes():
            places = self._on_host(mask)
            places = torch.ones(mask.shape, dtype=torch.bool) if places is _UNKNOWN else places
            columns = places.nonzero().unbind(1)
        return [self._put(column) for column in columns]

    def _put(self, values: Tensor) -> Tensor:
        """Return a device tensor of these values, which the host does not send."""
        made: Tensor = self.__torch_dispatch__(
            aten.empty.memory_format,
            (),
            (list(values.shape),),
            {"dtype": values.dtype, "device": torch.device("cuda")},
        )
        with _disable_current_modes():
            known = self.memory.values(made)
            if known is not None:
                known.copy_(values)
        return made

    # Arithmetic

    def count_product(self, rows: int, inner: int, columns: int) -> None:
        """Count a matrix product."""
        self.trace.flops[self.trace.phase] += 2 * rows * inner * columns

    def count_attention(self, borders: Tensor, q: Tensor, products: int) -> None:
        """Count causal attention of queries [t, heads, width] in sequences with these borders."""
        known = self.host_values(borders)
        with _disable_current_modes():
            lengths = known.diff().double()
            scale = q.shape[0] / max(float(lengths.sum()), 1.0)  # what of the sequences is here
            pairs = float(lengths.square().sum()) / 2 * scale
        self.trace.flops[self.trace.phase] += int(2 * products * pairs * q.shape[-2] * q.shape[-1])

    def _count_flops(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func._schema.name.removeprefix("aten::")
        if name in _PRODUCTS:
            left, right = (args[number] for number in _PRODUCTS[name])
            self.count_product(left.numel() // left.shape[-1], left.shape[-1], right.shape[-1])
        elif func.overloadpacket in flop_registry:
            self.trace.flops[self.trace.phase] += flop_registry[func.overloadpacket](
                *args, **kwargs, out_val=out
            )


_UNKNOWN = object()
_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)


def _device_tensors(out: Any) -> list[FakeTensor]:
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, FakeTensor) and leaf.device.type == "cuda"]
