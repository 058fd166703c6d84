"""Offloading of a training rank's GPU memory, to lend it to a server on the same GPU.

Tensor objects stay the same: their storages are emptied and later filled again, so views of them (Megatron's
buffers, the optimizer's shards, autograd's accumulators) stay valid.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate

import torch
from megatron.core.optimizer import ChainedOptimizer
from torch import Tensor

from megatron_fspo.mcore.model.policy import Model, Policy

Tensors = Callable[[], Iterator[Tensor]]
_ALIGN = 64
"""Alignment of each storage's copy on the host, in bytes: torch's own, and enough for every dtype."""
_TOUCHING = 8
"""Threads that touch pages before they are pinned."""


class Offloadable:
    """Tensors of a rank whose memory can be lent.

    Args:
        tensors: returns the tensors; called at each loan, as an optimizer creates some of its tensors late.
        but: returns tensors whose storages to exclude; these must be resident at the loan.
        kept: keep the content on the host; otherwise the tensors come back as zeros.
    """

    def __init__(self, tensors: Tensors, *, but: Tensors | None = None, kept: bool = True) -> None:
        self._tensors, self._but, self._kept = tensors, but, kept
        # For each emptied storage: one of its tensors, the size in bytes, the copy on the host (if kept).
        self._lent: list[tuple[Tensor, int, Tensor | None]] | None = None
        # Reused, because pinning memory takes longer than filling it.
        self._host = torch.empty(0, dtype=torch.uint8)

    def lend(self) -> None:
        """Empty the storages. A second call does nothing."""
        if self._lent is not None:
            return
        skipped = {tensor.untyped_storage().data_ptr() for tensor in self._but()} if self._but else set()
        tensors: dict[int, Tensor] = {}
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in skipped:
                tensors[storage.data_ptr()] = tensor
        cuda = any(tensor.device.type == "cuda" for tensor in tensors.values())
        sizes = [tensor.untyped_storage().nbytes() for tensor in tensors.values()]
        *places, total = starts(sizes)
        if self._kept and total > len(self._host):
            self._host = self._host.new_empty(0)  # free the old memory first
            self._host = host_memory(total, pinned=cuda)
        lent = [
            (tensor, size, self._host[at : at + size] if self._kept else None)
            for tensor, size, at in zip(tensors.values(), sizes, places, strict=True)
        ]
        for tensor, _, copy in lent:
            if copy is not None:
                copy.copy_(_bytes(tensor), non_blocking=True)
        if cuda:
            torch.cuda.synchronize()
        for tensor, _, _ in lent:
            tensor.untyped_storage().resize_(0)
        self._lent = lent

    def take_back(self) -> None:
        """Restore the storages. A second call does nothing."""
        if self._lent is None:
            return
        for tensor, size, copy in self._lent:
            tensor.untyped_storage().resize_(size)
            if copy is None:
                _bytes(tensor).zero_()
            else:
                _bytes(tensor).copy_(copy, non_blocking=True)
        self._lent = None


class Offload:
    """Moves a model, or a policy with its optimizer, off its device and back; also ``others`` that only
    training needs, such as the reference model of a KL penalty."""

    def __init__(self, model: Model, *others: Model) -> None:
        def weights() -> Iterator[Tensor]:
            return _parameters(model)

        def state() -> Iterator[Tensor]:
            for other in others:
                yield from _parameters(other)
            if isinstance(model, Policy):
                yield from _optimizer_tensors(model)

        self._models = (model, *others)
        self._device = model.backend.device
        self._weights = Offloadable(weights)
        # In float32 the optimizer updates the weights' own storages; these belong to the weights.
        self._rest = [Offloadable(state, but=weights)]
        if isinstance(model, Policy):
            buffers = [
                b for module in model.modules for b in (*module.buffers, *module.expert_parallel_buffers)
            ]
            self._rest.append(Offloadable(lambda: (buffer.grad_data for buffer in buffers), kept=False))

    def hold(self, *, weights: bool, rest: bool) -> None:
        """Choose whether the weights, and the rest (optimizer, gradients, other models), are on the device.

        Call this between optimizer steps, as gradients come back as zeros. Raises ``ValueError`` for ``rest``
        without ``weights``.
        """
        if rest and not weights:
            raise ValueError("rest=True needs weights=True: only training needs the rest")
        if not rest:
            for tensors in self._rest:
                tensors.lend()
            # Transformer Engine's FP8 copies of the weights; it recreates missing ones.
            for module in (m for model in self._models for chunk in model.chunks for m in chunk.modules()):
                vars(module).get("_fp8_workspaces", {}).clear()
        if not weights:
            self._weights.lend()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # memory in torch's cache is not free for a server
        if weights:
            self._weights.take_back()
        if rest:
            for tensors in self._rest:
                tensors.take_back()


def _parameters(model: Model) -> Iterator[Tensor]:
    return (parameter.data for chunk in model.chunks for parameter in chunk.parameters())


def _optimizer_tensors(policy: Policy) -> Iterator[Tensor]:
    """Yield the moments, and the fp32 copies or shards that the optimizer updates."""
    whole = policy.optimizer
    for each in whole.chained_optimizers if isinstance(whole, ChainedOptimizer) else [whole]:
        inner = each.optimizer
        for group in inner.param_groups:
            yield from (parameter.data for parameter in group["params"])
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def starts(sizes: Sequence[int]) -> list[int]:
    """Aligned offsets of blocks of these sizes in one buffer, followed by the buffer's size; in bytes."""
    return [0, *accumulate(size + -size % _ALIGN for size in sizes)]


def host_memory(size: int, *, pinned: bool) -> Tensor:
    """Allocate ``size`` bytes of host memory as a uint8 tensor.

    torch rounds pinned memory up to a power of two, so we pin anonymous memory: huge pages, touched by
    several threads first, which takes 0.4 s for 8 GiB instead of 4.8 s (one H200, 16 cores). Forks do not
    inherit it, as copy-on-write would separate it from the GPU.
    """
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(advice)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if pinned:
        with ThreadPoolExecutor(_TOUCHING) as pool:
            list(pool.map(lambda part: part[:: mmap.PAGESIZE].fill_(0), memory.chunk(4 * _TOUCHING)))
        runtime, address = torch.cuda.cudart(), memory.data_ptr()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostRegister(address, size, 0))
        weakref.finalize(memory, runtime.cudaHostUnregister, address)
    return memory


def _bytes(tensor: Tensor) -> Tensor:
    """Return a uint8 view of a tensor's whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
