"""Parses and validates the routes in a server's answer. No I/O."""

from __future__ import annotations

import base64
import math

import torch
from torch import Tensor

from megatron_fspo.packing.batch import route_dtype
from megatron_fspo.types import Routing


def read_routes(sent: str | None, routing: Routing, *, tokens: int, versions: int) -> Tensor:
    """Return the experts of all tokens of prompt and response but the last, [tokens - 1, layers, k]
    of ``route_dtype``.

    ``sent`` is the base64 of a ``.npy``; ``versions`` counts the weight versions that wrote the response.
    Raises ``ValueError`` with the reason if the routes are missing or unusable.
    """
    if sent is None:
        raise ValueError("the server sends none: start it with `megatron-fspo serve --routes`")
    if versions > 1:
        # Keys and values were recomputed, with the routers of the new weights; these routes are older.
        raise ValueError("the weights were updated during the response")
    shape = (tokens - 1, routing.layers, routing.per_token)
    data = bytearray(base64.b64decode(sent, validate=True))
    start = 10 + int.from_bytes(data[8:10], "little")
    header = data[10:start].decode("latin-1").strip()
    descr, dtype = ("|u1", torch.uint8) if routing.experts <= 256 else ("<u2", torch.int16)
    wanted = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"  # as numpy writes it
    size = start + math.prod(shape) * dtype.itemsize
    if data[:8] != b"\x93NUMPY\x01\x00" or header != wanted or len(data) != size:
        raise ValueError(f"got {len(data)} bytes of {header[:100]!r}, expected {wanted}")
    experts = torch.frombuffer(data, dtype=dtype, offset=start).to(route_dtype(routing.experts))
    routed = experts.view(shape)[:, routing.dense :]
    columns = routed.reshape(-1, routing.per_token).t().contiguous()  # fast to compare
    if not 0 <= int(columns.min()) <= (largest := int(columns.max())) < routing.experts:
        raise ValueError(f"got expert {largest}, but a layer has {routing.experts}")
    if any((columns[i + 1 :] == columns[i]).any() for i in range(routing.per_token - 1)):
        raise ValueError("got an expert twice for one token, as in rows that were never filled")
    return experts.view(shape)
