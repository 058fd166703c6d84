"""Weights for servers as what changed since the last update, bit for bit; both ends keep what was sent last.

A bf16 weight moves only when its fp32 master has moved by half of a rounding: in one step few do. A message
has for a tensor of n words of 16 bits, in blocks of 65,536 words: changed words per block, int32; their new
values; their offsets from the middle of the block, int16. No words at all say that nothing changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

_CHANGED = " changed as "
"""In the name of a message, between that of the tensor and its dtype. Other names are of whole tensors."""
_BLOCK = 2**16
_CHUNK = 64 * _BLOCK
"""Words that are compared at a time: in some 100 MiB of a GPU at most."""


class Held:
    """A worker's end: tensors as they were sent last, on the CPU."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def decode(self, sent: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors, which are to be read only, for what :meth:`Changes.encode` yields."""
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
    """The trainer's end, for workers that all hold the same."""

    def __init__(self) -> None:
        self._held = Held()
        self._served: Mapping[str, set[str]] = {}

    def narrow(self, served: Mapping[str, set[str]]) -> None:
        """From now on round tensors as servers do: by name the dtypes, as ``bfloat16``, that these have them
        in. What is narrower than the trainer's, and the same in all, is also what is sent."""
        self._served = served

    def encode(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor whole, or a shorter message under another name, on the tensor's own device.

        What was yielded counts as sent: if it does not arrive everywhere, both ends begin anew.
        """
        for name, parameter in tensors:
            tensor = parameter.detach()
            dtypes = {getattr(torch, dtype) for dtype in self._served.get(name, ())}
            if len(dtypes) == 1 and (served := dtypes.pop()).itemsize < tensor.itemsize:
                tensor = tensor.to(served)
            held, sent = self._held.tensors.get(name), (name, tensor)
            message = None if held is None else _message(held.to(tensor.dtype), tensor)
            if message is not None:
                sent = (f"{name}{_CHANGED}{str(tensor.dtype).removeprefix('torch.')}", message)
            for _ in self._held.decode([sent]):  # as the workers will
                yield sent


def _words(tensor: Tensor) -> Tensor:
    """The tensor's bits [n], in its own memory where that is contiguous."""
    return tensor.reshape(-1).view(torch.int16)


def _message(old: Tensor, new: Tensor) -> Tensor | None:
    """What makes ``new`` of ``old``: bytes; None where they are no fewer than those of ``new``."""
    counts, values, offsets = list[Tensor](), list[Tensor](), list[Tensor]()
    size = 0
    for before, words in zip(*(torch.split(_words(one), _CHUNK) for one in (old, new)), strict=True):
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
    """Change a tensor in place."""
    if not message.numel():
        return
    words = _words(tensor)
    blocks = -(-len(words) // _BLOCK)
    counts = message[: 4 * blocks].view(torch.int32).long()
    values, offsets = message[4 * blocks :].view(torch.int16).chunk(2)
    middles = torch.arange(_BLOCK // 2, _BLOCK * blocks, _BLOCK).repeat_interleave(counts)
    words[middles + offsets] = values
