"""Memory of a training rank, lent to a server on the same GPU and taken back.

A tensor stays the object that it is: its storage is emptied and later filled again, so that whoever holds a
view of it (Megatron's buffers, the optimizer's shards, autograd's accumulators) need not know.
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

from megatron_fspo.mcore.policy import Model, Policy

Tensors = Callable[[], Iterator[Tensor]]
_ALIGN = 64
"""Where content begins on the host: as in torch's own memory, and fit for every dtype."""
_TOUCHING = 8
"""Threads that touch memory before it is pinned."""


class Lendable:
    """Some tensors of a rank, on their device or lent.

    Args:
        tensors: asked each time, as an optimizer makes some of its own late.
        but: tensors whose storages are not among these, resident when it is lent.
        kept: the content is needed again; else it comes back as zeros.
    """

    def __init__(self, tensors: Tensors, *, but: Tensors | None = None, kept: bool = True) -> None:
        self._tensors, self._but, self._kept = tensors, but, kept
        # A tensor of each storage that is empty, its bytes, and what was in it, on the host, if it is needed
        # again.
        self._lent: list[tuple[Tensor, int, Tensor | None]] | None = None
        # It stays: to pin memory takes longer than to fill it.
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
            self._host = self._host.new_empty(0)  # the smaller one goes first
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
        """Fill the storages again. A second call does nothing."""
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
    """The memory of a model, or of a policy with its optimizer, on its device, and of others that only
    training needs, such as the reference of a KL penalty."""

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
        self._weights = Lendable(weights)
        # In float32 the optimizer updates the weights themselves: what they share is the weights'.
        self._rest = [Lendable(state, but=weights)]
        if isinstance(model, Policy):
            buffers = [
                b for module in model.modules for b in (*module.buffers, *module.expert_parallel_buffers)
            ]
            self._rest.append(Lendable(lambda: (buffer.grad_data for buffer in buffers), kept=False))

    def hold(self, *, weights: bool, rest: bool) -> None:
        """Have on the device the weights, and the rest (optimizer, gradients, other models), or not.

        What goes, goes before anything comes. Gradients come back as zeros: between two optimizer steps.

        Raises:
            ValueError: the rest without the weights.
        """
        if rest and not weights:
            raise ValueError("there is no use for the rest without the weights")
        if not rest:
            for tensors in self._rest:
                tensors.lend()
            # Transformer Engine keeps FP8 copies of the weights, and makes anew what is missing.
            for module in (m for model in self._models for chunk in model.chunks for m in chunk.modules()):
                vars(module).get("_fp8_workspaces", {}).clear()
        if not weights:
            self._weights.lend()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what PyTorch keeps for itself is as good as taken
        if weights:
            self._weights.take_back()
        if rest:
            for tensors in self._rest:
                tensors.take_back()


def _parameters(model: Model) -> Iterator[Tensor]:
    return (parameter.data for chunk in model.chunks for parameter in chunk.parameters())


def _optimizer_tensors(policy: Policy) -> Iterator[Tensor]:
    """Moments, and the fp32 copies or shards that are updated."""
    whole = policy.optimizer
    for each in whole.chained_optimizers if isinstance(whole, ChainedOptimizer) else [whole]:
        inner = each.optimizer
        for group in inner.param_groups:
            yield from (parameter.data for parameter in group["params"])
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def starts(sizes: Sequence[int]) -> list[int]:
    """Where contents of so many bytes begin in one piece of memory, and behind them its size."""
    return [0, *accumulate(size + -size % _ALIGN for size in sizes)]


def host_memory(size: int, *, pinned: bool) -> Tensor:
    """So many bytes of the host.

    Torch's own pinned memory comes in powers of two: 5 GiB and a byte would take 8. These are pages of the
    system, pinned as they are: large ones, which several threads have touched before, 0.4 s for 8 GiB where
    pinning alone takes 4.8 (one H200, 16 cores). No fork copies them, as that would part them from the GPU.
    """
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
        with suppress(OSError):  # a kernel without large pages
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
    """The whole storage of a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
