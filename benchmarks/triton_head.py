"""The head's kernels, compiled for GPUs that need not be there.

    python benchmarks/triton_head.py

What Triton and its ptxas make of each kernel: registers, spills, shared memory, thread blocks on a
multiprocessor. Needs Triton (a CUDA build of torch brings it), and no GPU; head_on_gpu.py times them on one.
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


def builds_table(report: Mapping[str, Any]) -> str:
    """Markdown: what became of the kernels for each compute capability."""
    rows = []
    for capability in dict.fromkeys(one["capability"] for one in report["builds"]):
        found = [one for one in report["builds"] if one["capability"] == capability]
        products = ", ".join(dict.fromkeys(one["products"] for one in found if one["products"]))
        rows.append([f"sm_{capability}", products, str(sum(one["spilled"] for one in found))])
    return markdown(["", "products by", "spilled bytes"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of(__doc__)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/triton_head.json")
    args = parser.parse_args(arguments)
    builds = [asdict(build(kind, capability)) for capability in (80, 90, 100) for kind in KINDS]
    report = {"command": "python benchmarks/triton_head.py", "builds": builds}
    args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{builds_table(report)}\n\n{args.json}")


if __name__ == "__main__":
    main()
