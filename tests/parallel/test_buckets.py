"""Tensors packed into one message come out as they went in."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_fspo.parallel.buckets import from_bytes, in_buckets, num_bytes, to_bytes

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int16, torch.float64)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    bits = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(bits)
    tensor = torch.randint(0, 200, draw(SHAPES), generator=generator).to(draw(st.sampled_from(DTYPES)))
    return tensor.transpose(0, -1) if tensor.dim() > 1 and draw(st.booleans()) else tensor


@given(st.lists(tensors(), min_size=1, max_size=6))
def test_what_is_packed_is_unpacked(bucket: list[Tensor]) -> None:
    packed = to_bytes(bucket, CPU)
    kinds, shapes = [tensor.dtype for tensor in bucket], [tensor.shape for tensor in bucket]
    assert packed.dtype == torch.uint8 and packed.shape == (num_bytes(kinds, shapes),)
    for tensor, got in zip(bucket, from_bytes(packed, kinds, shapes), strict=True):
        assert got.dtype == tensor.dtype and torch.equal(got, tensor)
        assert got.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()


def test_a_large_tensor_alone_is_not_copied() -> None:
    tensor = torch.rand(3, 5)
    assert to_bytes([tensor], CPU).data_ptr() == tensor.data_ptr()


def test_buckets() -> None:
    named = [(str(i), torch.zeros(n)) for i, n in enumerate([1, 2, 1, 9, 1, 1])]
    names = [[name for name, _ in bucket] for bucket in in_buckets(named, 16)]
    assert names == [["0", "1", "2"], ["3"], ["4", "5"]]
    assert list(in_buckets([], 16)) == []
