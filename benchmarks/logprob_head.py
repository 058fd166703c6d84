"""Time, memory and error of the log-prob head beside other ways to the same log-probs, on one CPU thread.

    python benchmarks/logprob_head.py

Every variant computes log p of T labels from hidden states [T, H] and a weight [V, H], and both gradients
from a random gradient per token. Each measurement is a process of its own: a tiny warm-up, one pass that is
not timed, one that is. The rounds go through all variants in turn; the smallest time and the smallest peak of
a variant count. Time is CPU time of the process, peak how far the resident set rises above the inputs (the
gradients are in it). Errors are against float64.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # checkpoint imports it, and then its default arguments would keep the group
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from machine import ROOT, environment, machine, markdown, options_of, peak_kib
from megatron_fspo.parallel.head import HeadKind, linear_log_probs

CHUNK = 256
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Size = Mapping[str, Any]  # tokens, hidden, vocab, dtype


def ours(hidden: Tensor, weight: Tensor, labels: Tensor, kind: HeadKind = "auto") -> Tensor:
    """The head through a group of one rank; it computes the entropies too."""
    rows = torch.arange(len(labels), device=labels.device)
    group = dist.group.WORLD
    assert group is not None
    size = len(weight)
    return linear_log_probs(hidden, weight, labels, rows, group=group, vocab_size=size, kind=kind)[0]


def naive(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Logits, log-softmax in fp32, gather."""
    logits = (hidden @ weight.t()).float()
    return torch.log_softmax(logits, -1).gather(-1, labels[:, None])[:, 0]


def cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """torch's cross entropy of the logits, in fp32."""
    return -F.cross_entropy((hidden @ weight.t()).float(), labels, reduction="none")


def checkpointed(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Chunks of tokens, each the naive way under activation checkpointing."""
    chunks = zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True)
    return torch.cat([checkpoint(naive, h, weight, y, use_reentrant=False) for h, y in chunks])


def torch_linear(**options: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """torch's linear cross entropy (new in 2.13); with options it goes in chunks of tokens."""

    def run(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        chosen = torch.nn.LinearCrossEntropyOptions(**options) if options else None
        return -F.linear_cross_entropy(hidden, weight, labels, reduction="none", options=chosen)

    return run


VARIANTS = {
    "naive": naive,
    "ours": ours,
    "cross_entropy": cross_entropy,
    "checkpoint": checkpointed,
}
if hasattr(F, "linear_cross_entropy"):
    VARIANTS |= {
        "linear_cross_entropy": torch_linear(),
        "linear_cross_entropy, auto": torch_linear(chunking_method="auto"),
        f"linear_cross_entropy, {CHUNK}": torch_linear(batch_chunk_size=CHUNK),
    }


def inputs(size: Size) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, labels, and the gradient of each log-prob; logits of standard deviation 2."""
    generator = torch.Generator().manual_seed(0)
    dtype = DTYPES[size["dtype"]]
    hidden = torch.randn(size["tokens"], size["hidden"], generator=generator, dtype=dtype)
    weight = torch.randn(size["vocab"], size["hidden"], generator=generator, dtype=dtype)
    weight.mul_(2 / size["hidden"] ** 0.5)  # in place: no peak of its own
    labels = torch.randint(size["vocab"], (size["tokens"],), generator=generator)
    upstream = torch.randn(size["tokens"], generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), labels, upstream


def measure_here(variant: str, size: Size, passes: int = 2) -> dict[str, float]:
    """CPU seconds of the last pass, and peak of all in MiB."""

    def one_pass(hidden: Tensor, weight: Tensor, labels: Tensor, upstream: Tensor) -> float:
        hidden.grad = weight.grad = None
        began = time.process_time()
        log_probs = VARIANTS[variant](hidden, weight, labels)
        log_probs.backward(upstream.to(log_probs.dtype))
        return time.process_time() - began

    one_pass(*inputs({**size, "tokens": 4, "vocab": 64}))
    given = inputs(size)
    before = peak_kib()
    seconds = [one_pass(*given) for _ in range(passes)][-1]
    peak = peak_kib() - before
    return {"seconds": seconds, "peak_mib": peak / 1024}


def exact(hidden: Tensor, weight: Tensor, labels: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs and both gradients in float64."""
    h, w = (leaf.detach().double().requires_grad_() for leaf in (hidden, weight))
    found = []
    for part in torch.arange(len(labels), device=labels.device).split(CHUNK):
        log_p = torch.log_softmax(h[part] @ w.t(), -1).gather(-1, labels[part, None])[:, 0]
        log_p.backward(upstream[part].double())
        found.append(log_p.detach())
    assert h.grad is not None and w.grad is not None
    return torch.cat(found), h.grad, w.grad


def errors(log_probs: Tensor, *gradients: Tensor, want: Sequence[Tensor]) -> dict[str, float]:
    """Largest error of a log-prob; ‖error‖ / ‖gradient‖ and largest error of each gradient."""
    result = {"log_prob": (log_probs.double() - want[0]).abs().max().item()}
    for name, made, right in zip(("hidden", "weight"), gradients, want[1:], strict=True):
        error = made.double() - right
        result[f"{name}_gradient"] = (error.norm() / right.norm()).item()
        result[f"{name}_gradient_entry"] = error.abs().max().item()
    return result


def errors_here(variant: str, size: Size) -> dict[str, float]:
    """``errors`` of a variant."""
    hidden, weight, labels, upstream = inputs(size)
    log_probs = VARIANTS[variant](hidden, weight, labels)
    log_probs.backward(upstream.to(log_probs.dtype))
    assert hidden.grad is not None and weight.grad is not None
    want = exact(hidden, weight, labels, upstream)
    return errors(log_probs.detach(), hidden.grad, weight.grad, want=want)


def in_fresh_process(task: str, variant: str, size: Size, **more: int) -> dict[str, float]:
    """``measure_here`` or ``errors_here`` in a process of its own, on one thread."""
    arguments = json.dumps({"task": task, "arguments": {"variant": variant, "size": dict(size), **more}})
    command = [sys.executable, str(Path(__file__).resolve()), "--in-this-process", arguments]
    done = subprocess.run(command, env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}{variant} failed, exit status {done.returncode}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def serve(arguments: str) -> None:
    """What ``in_fresh_process`` asked for, as JSON on stdout."""
    asked = json.loads(arguments)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    work: Callable[..., dict[str, float]] = {"measure": measure_here, "errors": errors_here}[asked["task"]]
    print(json.dumps(work(**asked["arguments"])))
    dist.destroy_process_group()


def compare(size: Size, rounds: int) -> dict[str, dict[str, float]]:
    """Peak in MiB, and time and peak as multiples of the naive ones, of every variant."""
    runs: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for _ in range(rounds):
        for variant, made in runs.items():
            made.append(in_fresh_process("measure", variant, size))
    least = {
        variant: {key: min(run[key] for run in made) for key in ("seconds", "peak_mib")}
        for variant, made in runs.items()
    }
    first = least["naive"]
    return {
        variant: {
            "time": round(figures["seconds"] / first["seconds"], 3),
            "peak": round(figures["peak_mib"] / first["peak_mib"], 3),
            "peak_mib": round(figures["peak_mib"], 1),
        }
        for variant, figures in least.items()
    }


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: time and peak as multiples of the naive ones, a pair of columns per size."""
    heads = [f"{r['size']['dtype']}, T={r['size']['tokens']}" for r in results]
    rows = []
    for variant in VARIANTS:
        found = [r["variants"][variant] for r in results]
        rows.append(
            [variant, *(cell for one in found for cell in (f"{one['time']:.2f}", f"{one['peak']:.3f}"))]
        )
    return markdown(["", *(name for head in heads for name in (f"{head}: time", "peak"))], rows)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096], help="T (default 2048 4096)")
    parser.add_argument("--hidden", type=int, default=512, help="H (default 512)")
    parser.add_argument("--vocab", type=int, default=32768, help="V (default 32768)")
    parser.add_argument("--dtype", choices=[*DTYPES], nargs="+", default=["fp32"], help="(default fp32)")
    parser.add_argument("--rounds", type=int, default=3, help="processes per variant (default 3)")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round, to see that it runs")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/logprob_head.json")
    parser.add_argument("--in-this-process", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_this_process:
        serve(args.in_this_process)
        return
    if args.quick:
        args.tokens, args.hidden, args.vocab, args.rounds = [512, 1024], 64, 8192, 1
    sizes = [
        {"tokens": tokens, "hidden": args.hidden, "vocab": args.vocab, "dtype": dtype}
        for dtype in args.dtype
        for tokens in args.tokens
    ]
    results = [{"size": size, "variants": compare(size, args.rounds)} for size in sizes]
    for result in results:
        if result["size"]["tokens"] == args.tokens[0]:
            result["errors"] = {v: in_fresh_process("errors", v, result["size"]) for v in ("naive", "ours")}
    command = shlex.join(["python", "benchmarks/logprob_head.py", *sys.argv[1:]])
    report = {"command": command, "machine": machine(), "rounds": args.rounds, "results": results}
    args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(results))
    for result in results:
        for variant, errors in result.get("errors", {}).items():
            figures = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
            print(f"\n{variant}, {result['size']['dtype']}, error against float64: {figures}")
    print(f"\n{json.dumps(report['machine'])}\n{args.json}")


if __name__ == "__main__":
    main()
