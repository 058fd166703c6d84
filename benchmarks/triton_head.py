"""The head's kernels, compiled for GPUs that need not be there, and the time they should take on an H100.

    python benchmarks/triton_head.py

Computed, not measured. First, what Triton and its ptxas make of each kernel: registers, spills, shared
memory, thread blocks on a multiprocessor. Then forward and backward of one micro-batch, beside the chunks in
torch: a product takes its FLOPs at a share of the peak, what is read and written between products its bytes
at the memory's bandwidth, one after the other. Needs Triton (a CUDA build of torch brings it), and no GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from machine import ROOT, markdown, options_of

SHARED = {8: 163, 9: 227, 10: 227}
"""KiB of shared memory that a thread block may have, by the major number of the compute capability."""
PEAK, BANDWIDTH = 989e12, 3.35e12
"""An H100's (SXM): FLOP/s of bf16 products without sparsity, bytes/s."""
OURS, CUBLAS = 0.60, 0.73
"""Shares of the peak. cuBLAS: an LM head's three products at 728 TFLOP/s (measured by others on an H100, TRL
#7244). Ours: a guess; at these shapes verl's Triton head reaches 0.21 to 0.48, kernels written by hand 0.80
(H200, Liger #1422)."""
KINDS = {
    "forward": ("forward_kernel", {}),
    "gradient, again": ("backward_kernel", {"from_kept": False}),
    "gradient, from kept": ("backward_kernel", {"from_kept": True}),
}


@dataclass(frozen=True, kw_only=True)
class Build:
    """One kernel for one compute capability."""

    kind: str
    capability: int
    tile: str
    registers: int
    spilled: int
    """Bytes stored, per thread."""
    shared: int
    """Bytes."""
    blocks: int
    """Thread blocks that fit a multiprocessor by registers and shared memory."""
    products: str
    """The instruction of the products."""


def build(kind: str, capability: int, hidden: int = 4096) -> Build:
    """Compile a kernel as it would be launched; for a hidden size that no descriptor takes, without."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_fspo.parallel import triton_head, triton_kernels

    name, constants = KINDS[kind]
    config = triton_head.AMPERE if hidden % 8 else triton_head.CONFIGS[capability // 10]
    config = triton_head.flat(config) if constants.get("from_kept") else config
    kernel = getattr(triton_kernels, name)
    constants = {**constants, **triton_head.constants(config, hidden)}
    options = {key: constants.pop(key) for key in ("num_warps", "num_stages")}
    pointers = dict.fromkeys(("table", "tops", "factors"), "*fp32") | dict.fromkeys(
        ("kept", "block"), "*bf16"
    )
    pointers |= dict.fromkeys(("labels", "used"), "*i64")
    for operand, rows in (("h", config.rows), ("w", config.columns)):
        described = f"tensordesc<bf16[{rows},{config.depth}]>"
        pointers[operand] = described if config.descriptors else "*bf16"
    signature = {
        arg: "constexpr" if arg in constants else pointers.get(arg, "fp32" if arg == "scale" else "i32")
        for arg in kernel.arg_names
    }
    aligned = [
        arg for arg in signature if signature[arg][0] == "*" or arg in ("start", "size", "kept_columns")
    ]
    attributes = {(kernel.arg_names.index(arg),): [["tt.divisibility", 16]] for arg in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spilled = _assembled(made.asm["ptx"], capability)
    threads, shared = 32 * options["num_warps"], made.metadata.shared
    by_registers = 65536 // (-(-registers // 8) * 8 * threads)
    by_shared = (SHARED[capability // 10] + 1) * 1024 // (shared + 1024)  # the system takes 1 KiB of each
    found = [word for word in ("wgmma", "tcgen05.mma", "mma.sync") if word in made.asm["ptx"]]
    return Build(
        kind=kind,
        capability=capability,
        tile=f"{config.rows} × {config.columns}, {options['num_warps']} warps",
        registers=registers,
        spilled=spilled,
        shared=shared,
        blocks=min(by_registers, by_shared, 2048 // threads),
        products=found[0] if found else "",
    )


def _assembled(ptx: str, capability: int) -> tuple[int, int]:
    """Registers of a thread and bytes that it spills, as ptxas says."""
    import triton

    binary = "ptxas-blackwell" if capability >= 100 else "ptxas"
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin" / binary
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        command = [str(ptxas), "-v", f"--gpu-name={target[1]}", str(source), "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spilled = re.search(r"(\d+) bytes spill stores", said)
    assert registers and spilled, said
    return int(registers[1]), int(spilled[1])


def estimate(
    *, tokens: int, hidden: int, vocab: int, tensor: int, keep: float | None
) -> dict[str, float | None]:
    """Milliseconds on one of ``tensor`` H100s, without collectives, and GiB that are kept.

    Args:
        keep: bytes that forward may keep, per GPU; None for the chunks in torch.
    """
    logits = tokens * vocab / tensor
    share = min(1.0, (keep or 0) / (2 * logits))
    product = 2 * logits * hidden / PEAK * 1e3
    # What was kept is read, and its gradient written.
    moved, made = 4 * share * logits, product / OURS
    if keep is None:  # fp32 logits and their passes: 40 bytes each in forward, 36 in backward
        moved, made = 76 * logits, product / CUBLAS
    parts = {
        "forward": made,
        "again": (1 - share) * made,
        "moved": moved / BANDWIDTH * 1e3,
        "gradients": 2 * product / CUBLAS,
    }
    kept = None if keep is None else share * 2 * logits / 2**30
    return {"tensor": tensor, "kept_gib": kept, "products": 4 - share, **parts, "all": sum(parts.values())}


def builds_table(report: Mapping[str, Any]) -> str:
    """Markdown: what became of each kernel."""
    rows = [
        [
            f"sm_{one['capability']}: {one['kind']}",
            one["products"] or "none",
            str(one["spilled"]),
        ]
        for one in report["builds"]
    ]
    head = ["", "products by", "spilled bytes"]
    return markdown(head, rows)


def estimates_table(report: Mapping[str, Any]) -> str:
    """Markdown: milliseconds of each part."""
    rows = [
        [
            f"TP{one['tensor']}, "
            + ("torch" if one["kept_gib"] is None else f"kernels, {one['kept_gib']:.2f} GiB kept"),
            f"{one['products']:.2f}",
            *(f"{one[part]:.0f}" for part in ("forward", "again", "moved", "gradients", "all")),
        ]
        for one in report["estimates"]
    ]
    head = ["", "products", "forward", "logits again", "between", "d hidden, d weight", "all, ms"]
    return markdown(head, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of(__doc__)
    parser.add_argument("--tokens", type=int, default=32768, help="response tokens (default 32768)")
    parser.add_argument("--hidden", type=int, default=4096, help="H (default 4096)")
    parser.add_argument("--vocab", type=int, default=151936, help="V (default 151936)")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/triton_head.json")
    args = parser.parse_args(arguments)
    size = {"tokens": args.tokens, "hidden": args.hidden, "vocab": args.vocab}
    builds = [asdict(build(kind, capability)) for capability in (80, 90, 100) for kind in KINDS]
    cases = [(1, None), (1, 0.0), (1, 2.0**30), (1, float("inf")), (8, None), (8, 0.0), (8, 2.0**30)]
    estimates = [estimate(**size, tensor=tensor, keep=keep) for tensor, keep in cases]
    command = "python benchmarks/triton_head.py"
    report = {"command": command, "size": size, "builds": builds, "estimates": estimates}
    args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{builds_table(report)}\n\n{estimates_table(report)}\n\n{args.json}")


if __name__ == "__main__":
    main()
