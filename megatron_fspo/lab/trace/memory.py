"""Memory of the device: which line holds how much; and the values of what is small."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from megatron_fspo.lab.trace.record import Site, Trace

VALUE_BYTES = 1 << 20
"""The largest storage that has its values on the host."""
BLOCK = 512
"""Bytes that torch's allocator rounds up to."""


@dataclass
class Storage:
    """Memory of the device, and its values where it is small."""

    size: int
    site: Site
    phase: str
    values: UntypedStorage | None
    unseen: bool
    """Made inside a kernel, which has not returned it yet."""


class Memory:
    """The storages that are there; what they hold counts for the trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._storages: dict[int, Storage] = {}
        self._held: Counter[tuple[str, Site]] = Counter()

    def begin(self, trace: Trace) -> None:
        """Count for another trace; what is held from before counts no more."""
        self._trace = trace
        self._held.clear()
        for kept in self._storages.values():
            kept.size = 0

    def knows(self, tensor: Tensor) -> bool:
        """Return True if the storage of a tensor has been seen."""
        return tensor.untyped_storage()._cdata in self._storages

    def hold(self, tensor: Tensor, site: Site, *, inside_kernel: bool) -> None:
        """Note that there is a tensor; one that a kernel makes counts when it is returned."""
        storage, trace = tensor.untyped_storage(), self._trace
        kept = self._storages.get(storage._cdata)
        if kept is not None and not kept.unseen:
            return
        size = 0 if inside_kernel else _in_blocks(storage.nbytes())
        if kept is None:
            kept = self._storages[storage._cdata] = Storage(size, site, trace.phase, None, inside_kernel)
            weakref.finalize(storage, self._gone, storage._cdata)
        kept.size, kept.phase, kept.site, kept.unseen = size, trace.phase, site, inside_kernel
        key = trace.phase, site
        trace.allocations[key] = max(trace.allocations.get(key, 0), size)
        if tensor.dtype == torch.float64 and storage.nbytes() > VALUE_BYTES:
            trace.wide[key] += 1
        self._grow(size, key)

    def resized(self, storage: UntypedStorage, size: int) -> None:
        """Note that a storage has another size now."""
        kept = self._storages.get(storage._cdata)
        if kept is not None and not kept.unseen:
            self._grow(_in_blocks(size) - kept.size, (kept.phase, kept.site))
            kept.size, kept.values = _in_blocks(size), None

    def _grow(self, size: int, key: tuple[str, Site]) -> None:
        trace = self._trace
        trace.live += size
        self._held[key] += size
        trace.peaks[trace.phase] = max(trace.peaks.get(trace.phase, 0), trace.live)
        if trace.live > trace.peak:
            trace.peak, trace.at_peak = trace.live, self._held.copy()

    def _gone(self, storage: int) -> None:
        kept = self._storages.pop(storage)
        self._trace.live -= kept.size
        self._held[kept.phase, kept.site] -= kept.size

    def wants_values(self, tensor: Tensor) -> bool:
        """Return True if a tensor is small, and its values are not known yet."""
        kept = self._storages.get(tensor.untyped_storage()._cdata)
        return kept is not None and kept.values is None and tensor.untyped_storage().nbytes() <= VALUE_BYTES

    def give_values(self, tensor: Tensor) -> Tensor:
        """Return ones, which are now the values of a tensor, to be written over."""
        storage = tensor.untyped_storage()
        ones = torch.ones(-(-storage.nbytes() // tensor.itemsize), dtype=tensor.dtype)
        self._storages[storage._cdata].values = ones.untyped_storage()
        values = self.values(tensor)
        assert values is not None
        return values

    def values(self, tensor: Tensor) -> Tensor | None:
        """Return the values of a tensor, on the host, to read and write; None where they are not known."""
        kept = self._storages.get(tensor.untyped_storage()._cdata)
        if kept is None or kept.values is None:
            return None
        empty: Tensor = torch.empty(0, dtype=tensor.dtype)
        place: tuple[int, ...] = tensor.size(), tensor.stride()  # type: ignore[assignment]
        return empty.set_(kept.values, tensor.storage_offset(), *place)  # type: ignore[call-overload, no-any-return]


def _in_blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
