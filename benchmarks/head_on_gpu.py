"""Time, memory and error of the log-prob head on a GPU, beside Liger's head and logits in torch.

    python benchmarks/head_on_gpu.py --out benchmarks/results/NAME.json

Every variant computes log p of T labels from bf16 hidden states and weight, and both gradients. One pass
compiles, the next shows peak memory above the inputs and errors against float64; three more are timed by CUDA
events, the variants in turn. Medians count. What does not run here says why.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch import Tensor

from logprob_head import checkpointed, cross_entropy, errors, exact, naive, ours
from machine import markdown, options_of
from megatron_fspo.parallel import head

ROUNDS, PACKAGES = 3, ("torch", "triton", "liger_kernel")
FIRST, ALIKE = "ours, 1 GiB", ("liger mean, fp32 sums", "plain logits, log-softmax")
DEVICE, BACKEND = ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def kernels(gib: int, *inputs: Tensor) -> Tensor:
    """Our kernels, which may keep so many GiB for backward."""
    with patch.object(head, "KEEP_BYTES", gib << 30):
        return ours(*inputs, kind="triton")


def liger(*inputs: Tensor, reduction: str, dtype: Any = None) -> Tensor:
    """Liger's head; ``dtype`` is that of the sums of the weight's gradient."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    # Bias, class weights, ignored label, z-loss, smoothing; after the reduction soft cap and returned z-loss.
    options = (None, None, -100, 0.0, 0.0, reduction, None, False, dtype)
    return -LigerFusedLinearCrossEntropyFunction.apply(*inputs, *options)[0]


VARIANTS: dict[str, Callable[..., Tensor]] = {
    FIRST: partial(kernels, 1),
    "ours, 0 GiB": partial(kernels, 0),
    "ours, 16 GiB": partial(kernels, 16),
    "ours, 1 GiB, main_grad": partial(kernels, 1),
    "ours, in torch": partial(ours, kind="torch"),
    "liger none": partial(liger, reduction="none"),
    "liger none, fp32 sums": partial(liger, reduction="none", dtype=torch.float32),
    "liger mean": partial(liger, reduction="mean"),
    "liger mean, fp32 sums": partial(liger, reduction="mean", dtype=torch.float32),
    "plain logits, cross entropy": cross_entropy,
    "plain logits, log-softmax": naive,
    "checkpointed chunks of 256": checkpointed,
}


def inputs(size: Mapping[str, int]) -> Inputs:
    """bf16 hidden states and weight, labels, and the gradient of each log-prob; logits have σ = 2."""
    torch.manual_seed(0)
    shapes = [(size[rows], size["hidden"]) for rows in ("tokens", "vocab")]
    hidden, weight = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for shape in shapes)
    weight.mul_(2 / size["hidden"] ** 0.5)
    labels = torch.randint(0, size["vocab"], (size["tokens"],), device=DEVICE)
    upstream = torch.randn(size["tokens"], device=DEVICE)
    return hidden.requires_grad_(), weight.requires_grad_(), labels, upstream


def one_pass(name: str, given: Inputs) -> tuple[Tensor, list[float]]:
    """Log-probs, and milliseconds of forward and of backward; gradients stay at the inputs."""
    given[0].grad = given[1].grad = None
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)] if DEVICE == "cuda" else [Mock()] * 3
    marks[0].record()
    log_probs = VARIANTS[name](*given[:3])
    marks[1].record()
    log_probs.backward(given[3].to(log_probs.dtype) if log_probs.ndim else None)
    marks[2].record()
    marks[2].synchronize()
    return log_probs.detach(), [
        a.elapsed_time(b) if DEVICE == "cuda" else math.nan for a, b in pairwise(marks)
    ]


def clear(name: str, given: Inputs) -> None:
    """Forget gradients; with ``main_grad`` the weight's goes to an fp32 buffer."""
    given[0].grad = given[1].grad = given[1].main_grad = None
    gc.collect()
    torch.cuda.empty_cache()
    if name.endswith("main_grad"):
        given[1].main_grad = torch.zeros(given[1].shape, device=DEVICE)


def check(name: str, given: Inputs, want: tuple[Tensor, Tensor, Tensor]) -> dict[str, Any]:
    """Peak memory and errors of a variant, and room for its times."""
    clear(name, given)
    one_pass(name, given)  # compiles
    clear(name, given)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats() if DEVICE == "cuda" else None
    log_probs = one_pass(name, given)[0]
    record = {"peak_gib": (torch.cuda.max_memory_allocated() - before) / 2**30}
    made = given[1].grad if given[1].main_grad is None else given[1].main_grad
    record |= errors(log_probs, given[0].grad, made, want=want) if log_probs.ndim else {}
    return record | {"forward_ms": [], "backward_ms": []}


def measure(size: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """All variants' figures, or why one does not run."""
    given, found = inputs(size), {}
    want = exact(*given)
    for name in VARIANTS:
        try:
            found[name] = check(name, given, want)
        except Exception as error:
            found[name] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    working = {name: record for name, record in found.items() if "failed" not in record}
    for name in [*working] * ROUNDS:
        clear(name, given)
        one_pass(name, given)  # the allocator has its blocks then, and the clock is up
        for what, ms in zip(("forward_ms", "backward_ms"), one_pass(name, given)[1], strict=True):
            working[name][what].append(ms)
    for one in working.values():
        both = zip(one["forward_ms"], one["backward_ms"], strict=True)
        one["median_ms"] = statistics.median(map(sum, both))
    return found


def table(report: Mapping[str, Any]) -> str:
    """Markdown: times relative to the first variant's, peaks, errors; without those like their neighbours."""
    first, rows = report["variants"][FIRST]["median_ms"], []
    for name, one in ((name, one) for name, one in report["variants"].items() if name not in ALIKE):
        off = [f"{one[what]:.1e}" if what in one else "–" for what in ("log_prob", "weight_gradient")]
        rows.append([name, f"{one['median_ms'] / first:.2f}", f"{one['peak_gib']:.1f}", *off])
    return markdown(["", "time", "peak, GiB", "log-prob, largest error", "weight's gradient, error"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options_of(__doc__)
    for name, default in {"tokens": 32768, "hidden": 4096, "vocab": 151936}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"(default {default})")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1)
    report = {
        "command": f"python benchmarks/head_on_gpu.py --out {args.out}",
        "gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else "none",
        "versions": {name: version(name) for name in PACKAGES if find_spec(name)},
        "size": (size := {name: value for name, value in vars(args).items() if name != "out"}),
        "variants": measure(size),
    }
    print(text := json.dumps(report, indent=1))
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
