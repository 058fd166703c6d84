"""The head's kernels in Triton: interpreted on real ranks (triton_worker.py), and compiled for GPUs that are
not here. Skipped where there is no Triton, which comes with CUDA builds of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch import torchrun, why

pytest.importorskip("triton", reason="there is no package triton; a CUDA build of torch brings it")

from triton_head import KINDS, SHARED, build

WORKER = Path(__file__).with_name("triton_worker.py")
PRODUCTS = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}


@pytest.mark.parametrize("nproc", [1, 2])
def test_the_kernels_match_a_float64_oracle(nproc: int, random_checkpoints: dict[str, Path]) -> None:
    """Values and gradients; see triton_worker.py for each check. Not forked: Triton chooses at its import."""
    done = torchrun([str(WORKER), str(random_checkpoints["tied"])], nproc=nproc, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + why(done.stderr)
    assert f"all held on {nproc} ranks" in done.stdout


@pytest.mark.parametrize("capability", PRODUCTS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kernel_compiles_to_what_its_gpu_has(kind: str, capability: int) -> None:
    made = build(kind, capability)
    assert made.spilled == 0
    assert made.shared <= SHARED[capability // 10] * 1024
    assert made.products == ("" if kind == "gradient, from kept" else PRODUCTS[capability])


def test_a_gpu_that_is_not_there_takes_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without memory, as in a search for host syncs and peaks: a kernel is one operation."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    from megatron_fspo.parallel import triton_head

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    made: list[str] = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made.append(str(func))
            return func(*args, **(kwargs or {}))

    n, hidden, width = 4096, 4096, 18992
    with FakeTensorMode(), torch.device("cuda"), Operations():
        states, weight = (torch.empty(rows, hidden, dtype=torch.bfloat16) for rows in (n, width))
        columns = torch.empty(n, dtype=torch.int64)
        table, *kept = triton_head.statistics(states, weight, columns, 1.0, 1 << 26)
        sums = torch.empty(n, hidden), torch.empty(width, hidden)
        triton_head.add_gradients(*sums, states, weight, columns, torch.empty(6, n), columns, *kept,
                                  temperature=1.0, block_bytes=1 << 26)  # fmt: skip
    assert table.shape[1:] == (4, n) and kept[0].shape == (n, 8192)
    assert made.count("fspo_head.statistics.default") == 1
    assert made.count("fspo_head.logits_gradient.default") == 3  # 8192 columns were kept, two blocks were not
    assert made.count("aten.addmm.dtype_out") == 2 * 3


def test_what_is_launched_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Triton finds it in a call, on sizes that it specialises on; nothing runs."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import JITFunction, driver

    from megatron_fspo.parallel import triton_head, triton_kernels

    class OfGPU:
        get_current_device = get_current_stream = staticmethod(lambda *_: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

    shared, forward = [], set()

    def compiled(self: JITFunction, *args: Any, warmup: bool, **more: Any) -> None:
        made = run(self, *args, warmup=True, **more)
        shared.append(made.metadata.shared)
        if self is triton_kernels.forward_kernel:
            forward.add((more["hidden_size"], made.hash))

    run, constants = JITFunction.run, triton_head.constants
    monkeypatch.setattr(JITFunction, "run", compiled)
    monkeypatch.setattr(triton_head, "INTERPRETED", triton_head.HOPPER)
    monkeypatch.setattr(triton_head, "constants", lambda config, hidden, widen: constants(config, hidden))
    monkeypatch.setattr(driver, "_active", OfGPU)
    for n, hidden, width in ((1, 64, 1), (300, 128, 1000), (5, 60, 17)):
        states, weight = (torch.zeros(rows, hidden, dtype=torch.bfloat16) for rows in (n, width))
        rows = torch.arange(n)
        for keep_bytes in (0, 300 * 512 * 2, 1 << 30):
            _, *kept = triton_head.statistics(states, weight, rows, 0.7, keep_bytes)
            sums = torch.zeros(n, hidden), torch.zeros(width, hidden)
            triton_head.add_gradients(*sums, states, weight, rows, torch.ones(6, n), rows, *kept,
                                      temperature=0.7, block_bytes=0)  # fmt: skip
    assert len(forward) == 3, "a pass that keeps nothing has another binary, and perhaps other bits"
    assert len(shared) == 3 * (2 + 5 + 2) and max(shared) <= SHARED[9] * 1024


@pytest.mark.parametrize("capability", [90, 100])
def test_operands_that_no_descriptor_takes_compile_too(capability: int) -> None:
    """Of a size or at an address that is no multiple of 16 bytes."""
    for kind in KINDS:
        made = build(kind, capability, hidden=4090)
        assert made.spilled == 0 and made.shared <= SHARED[9] * 1024, made
