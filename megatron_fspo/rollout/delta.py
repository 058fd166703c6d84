"""Encodes weight updates as bit-exact changes since the last update; both ends keep the weights sent last.

Few bf16 weights change in a step, since the fp32 master must move by half a rounding step first. A message
describes a tensor as 16-bit words in blocks of 65,536. It has the number of changed words per block (int32),
their new values, and their offsets from the middle of the block (int16). It is empty if nothing changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

_CHANGED = " changed as "
"""Separates the tensor's name and dtype in the name of a message. Names without it are of whole tensors."""
_BLOCK = 2**16
_CHUNK = 64 * _BLOCK
"""Words compared at a time, with about 100 MiB of GPU memory at most."""


class Held:
    """A worker's end: the tensors sent last, on the CPU."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def decode(self, sent: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors for the messages of :meth:`Changes.encode`. Callers must not modify them."""
        for label, tensor in sent:
            name, changed, dtype = label.partition(_CHANGED)
            if changed:
                held = self.tensors[name].to(getattr(torch, dtype))
                _apply(tensor.cpu(), held)
                tensor = held
            else:
                held = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
            self.tensors[name] = held
            yield name, tensor


class Changes:
    """The trainer's end, for workers that all hold the same tensors."""

    def __init__(self) -> None:
        self._held = Held()
        self._served: Mapping[str, set[str]] = {}

    def narrow(self, served: Mapping[str, set[str]]) -> None:
        """Convert tensors to the servers' dtype from now on, if it is the same in all servers and narrower
        than the trainer's. ``served``: tensor name → dtypes in the servers, such as ``bfloat16``."""
        self._served = served

    def encode(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor whole, or as a shorter message under another name, on the tensor's device. If one
        does not arrive everywhere, both ends must start anew."""
        for name, parameter in tensors:
            tensor = parameter.detach()
            dtypes = {getattr(torch, dtype) for dtype in self._served.get(name, ())}
            if len(dtypes) == 1 and (served := dtypes.pop()).itemsize < tensor.itemsize:
                tensor = tensor.to(served)
            held, sent = self._held.tensors.get(name), (name, tensor)
            message = None if held is None else _message(held.to(tensor.dtype), tensor)
            if message is not None:
                sent = (f"{name}{_CHANGED}{str(tensor.dtype).removeprefix('torch.')}", message)
            for _ in self._held.decode([sent]):  # as workers do
                yield sent


def _words(tensor: Tensor) -> Tensor:
    """Return the tensor's bits as 16-bit words [n], without a copy if it is contiguous."""
    return tensor.reshape(-1).view(torch.int16)


def _message(old: Tensor, new: Tensor) -> Tensor | None:
    """Return the message (bytes) that changes ``old`` to ``new``; None if it is no shorter than ``new``."""
    counts, values, offsets = list[Tensor](), list[Tensor](), list[Tensor]()
    size = 0
    for before, words in zip(*(torch.split(_words(tensor), _CHUNK) for tensor in (old, new)), strict=True):
        index = (before.to(words.device) != words).nonzero().squeeze(1)
        blocks = -(-len(words) // _BLOCK)
        counts.append(torch.bincount(index // _BLOCK, minlength=blocks).to(torch.int32))
        values.append(words[index])
        offsets.append((index % _BLOCK - _BLOCK // 2).to(torch.int16))
        size += 4 * blocks + 4 * len(index)
        if size >= new.nbytes:
            return None
    if not any(map(len, values)):
        return values[0].view(torch.uint8)
    return torch.cat([piece.view(torch.uint8) for piece in (*counts, *values, *offsets)])


def _apply(message: Tensor, tensor: Tensor) -> None:
    if not message.numel():
        return
    words = _words(tensor)
    blocks = -(-len(words) // _BLOCK)
    counts = message[: 4 * blocks].view(torch.int32).long()
    values, offsets = message[4 * blocks :].view(torch.int16).chunk(2)
    middles = torch.arange(_BLOCK // 2, _BLOCK * blocks, _BLOCK).repeat_interleave(counts)
    words[middles + offsets] = values
