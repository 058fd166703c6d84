"""Boxes of global tensors: cut, written by several writers, and read whatever the cut."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from megatron_fspo.errors import InputError
from megatron_fspo.weights.chunks import ChunkReader, ChunkWriter, boxes, merge_indexes, write_index

SHAPES = [(7,), (3, 4), (1, 5, 3), (2, 3, 2)]


def of_box(tensor: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("limit", [1, 4, 5, 100])
def test_boxes_are_the_run_in_order(shape: tuple[int, ...], limit: int) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    for first, end in itertools.combinations(range(whole.numel() + 1), 2):
        found = list(boxes(shape, first, end, limit=limit))
        values = torch.cat([of_box(whole, *box).flatten() for box in found])
        assert values.tolist() == list(range(first, end))
        assert all(math.prod(sizes) <= limit for _, sizes in found)
    assert not list(boxes(shape, 2, 2, limit=limit)) and not list(boxes(shape, 2, 1, limit=limit))


def written(folder: Path, *runs: tuple[int, int]) -> ChunkReader:
    """A tensor [3, 4] of 0 to 11, each run of it by another writer."""
    whole, parts = torch.arange(12.0).view(3, 4), []
    for rank, run in enumerate(runs):
        with ChunkWriter(folder, rank=rank) as writer:
            writer.declare("w", torch.float32, (3, 4))
            for offsets, sizes in boxes((3, 4), *run, limit=6):
                writer.add("w", offsets, of_box(whole, offsets, sizes))
            writer.close()
        parts.append(writer.index)
    write_index(folder, merge_indexes(parts))
    return ChunkReader(folder)


def test_a_box_is_read_from_what_several_wrote(tmp_path: Path) -> None:
    reader = written(tmp_path, (0, 3), (3, 10), (10, 12))
    assert "w" in reader and "v" not in reader and reader.shape("w") == (3, 4)
    for first, end in itertools.combinations(range(13), 2):
        target = torch.empty(end - first, dtype=torch.float64)
        wanted, at = [], 0
        for offsets, sizes in boxes((3, 4), first, end, limit=5):
            wanted.append(((offsets, sizes), target[at : at + math.prod(sizes)].view(sizes)))
            at += math.prod(sizes)
        reader.read_into("w", wanted)
        assert target.tolist() == list(range(first, end))
    # Rows beyond the stored tensor are zero: the vocabulary's padding.
    target = torch.full((3, 4), -1.0)
    reader.read_into("w", [(((1, 0), (3, 4)), target)])
    assert target.flatten().tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("runs", "problem"),
    [
        ([(0, 3), (4, 12)], "chunks cover 11 of 12 values of w"),
        ([(0, 4), (3, 11)], "chunks overlap in w"),
    ],
)
def test_holes_and_overlaps_are_refused(tmp_path: Path, runs: list[tuple[int, int]], problem: str) -> None:
    reader = written(tmp_path, *runs)
    with pytest.raises(InputError) as caught:
        reader.read_into("w", [(((0, 0), (3, 4)), torch.empty(3, 4))])
    assert str(caught.value) == f"{tmp_path / '.metadata'}: {problem} at (0, 0)"
