"""Memory of a training rank, lent to a server on the same GPU and taken back.

A tensor stays the object that it is: its storage is emptied and later filled again, so that whoever holds a
view of it (Megatron's buffers, the optimizer's shards, autograd's accumulators) need not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from megatron.core.optimizer import ChainedOptimizer
from torch import Tensor, UntypedStorage

from megatron_fspo.mcore.policy import Model, Policy

Tensors = Callable[[], Iterator[Tensor]]


class Lendable:
    """Some tensors of a rank, on their device or lent.

    Args:
        tensors: asked each time, as an optimizer makes some of its own late.
        but: tensors whose storages are not among these, resident when it is lent.
        kept: the content is needed again; else it comes back as zeros.
    """

    def __init__(self, tensors: Tensors, *, but: Tensors | None = None, kept: bool = True) -> None:
        self._tensors, self._but, self._kept = tensors, but, kept
        # Storages that are empty, their bytes, and what was in them, on the host, if it is needed again.
        self._lent: list[tuple[UntypedStorage, int, Tensor | None]] | None = None

    def lend(self) -> None:
        """Empty the storages. A second call does nothing."""
        if self._lent is not None:
            return
        skipped = {tensor.untyped_storage().data_ptr() for tensor in self._but()} if self._but else set()
        storages: dict[int, UntypedStorage] = {}
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in skipped:
                storages[storage.data_ptr()] = storage
        self._lent = [
            (storage, storage.nbytes(), _on_host(storage) if self._kept else None)
            for storage in storages.values()
        ]
        for storage, _, _ in self._lent:
            storage.resize_(0)

    def take_back(self) -> None:
        """Fill the storages again. A second call does nothing."""
        if self._lent is None:
            return
        for storage, size, copy in self._lent:
            storage.resize_(size)
            if copy is None:
                _bytes(storage).zero_()
            else:
                _bytes(storage).copy_(copy)
        self._lent = None


class Offload:
    """The memory of a model, or of a policy with its optimizer, on its device.

    Args:
        others: models that only training needs, such as the reference of a KL penalty.
    """

    def __init__(self, model: Model, *others: Model) -> None:
        def weights() -> Iterator[Tensor]:
            return _parameters(model)

        def state() -> Iterator[Tensor]:
            for other in others:
                yield from _parameters(other)
            if isinstance(model, Policy):
                yield from _optimizer_tensors(model)

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


def _on_host(storage: UntypedStorage) -> Tensor:
    content = _bytes(storage)
    copy = torch.empty(content.shape, dtype=torch.uint8, pin_memory=content.is_cuda)
    return copy.copy_(content)


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
