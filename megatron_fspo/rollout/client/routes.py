"""Routes in an answer, believed only where they can be those of its tokens. No I/O."""

from __future__ import annotations

import base64
import math

import torch
from torch import Tensor

from megatron_fspo.types import Routing


def read_routes(sent: str | None, routing: Routing, *, tokens: int, versions: int) -> Tensor:
    """Experts of all tokens of a prompt and its response but the last, uint8 [tokens - 1, layers, k], from
    the base64 of a ``.npy``, None if the server sent none. So many versions of the weights wrote the
    response.

    Raises:
        ValueError: why they are not believed.
    """
    if sent is None:
        raise ValueError("the server sends none: start it with `megatron-fspo serve --routes`")
    if versions > 1:
        # Keys and values were computed again, by routers of the new weights; these rows are older.
        raise ValueError("a weight update met the response")
    shape = (tokens - 1, routing.layers, routing.per_token)
    data = bytearray(base64.b64decode(sent, validate=True))
    start = 10 + int.from_bytes(data[8:10], "little")
    header = data[10:start].decode("latin-1").strip()
    wanted = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}"  # as numpy writes it
    if data[:8] != b"\x93NUMPY\x01\x00" or header != wanted or len(data) != start + math.prod(shape):
        raise ValueError(f"{len(data)} bytes of {header[:100]!r} where {wanted} was asked for")
    experts = torch.frombuffer(data, dtype=torch.uint8, offset=start)
    columns = experts.view(-1, routing.per_token).t().contiguous()  # fast to compare
    if (largest := int(columns.max())) >= routing.experts:
        raise ValueError(f"expert {largest} where there are {routing.experts}")
    if any((columns[i + 1 :] == columns[i]).any() for i in range(routing.per_token - 1)):
        raise ValueError("an expert twice for one token, as in rows that were never filled")
    return experts.view(shape)
