"""Run by the tests: begins several conversions, each in the middle of the one before, and waits to be killed.

Arguments: triples of direction, source and output folder.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import Tensor

from megatron_fspo.weights import (
    HFReader,
    MegatronReader,
    expected_hf_shapes,
    read_architecture,
    stream,
    write_hf_checkpoint,
    write_megatron_checkpoint,
)


def begin(jobs: list[str]) -> None:
    if not jobs:
        print("all are in the middle", flush=True)
        sys.stdin.read()
        raise AssertionError("it was not killed")
    (direction, source, out), rest = jobs[:3], jobs[3:]
    arch = read_architecture(source)
    if direction == "to Megatron":
        blocks: list[int] = []

        def progress(count: int) -> None:
            blocks.append(count)
            if len(blocks) == 5:
                begin(rest)

        write_megatron_checkpoint(out, HFReader(source), arch, progress=progress)
        return

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for number, given in enumerate(stream(MegatronReader(source, arch), expected_hf_shapes(arch))):
            if number == 5:
                begin(rest)
            yield given

    write_hf_checkpoint(out, tensors(), source)


if __name__ == "__main__":
    begin(sys.argv[1:])
