"""Time and memory: of a step, of sampling, of the head; and attention spread over GPUs."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_models import ALONE, best_layers, build, old_pass, scores, step_micro_batches, timed, update
from gpu_sizes import SIZES
from step_memory import layers_that_fit, state_bytes
from torch import Tensor

from backend import FAKE
from head_on_gpu import inputs as head_inputs
from head_on_gpu import kernels
from logprob_head import VARIANTS, ours
from megatron_fspo.config import Parallel
from megatron_fspo.config.fp8 import FP8
from megatron_fspo.lab.plan.activations import activations
from megatron_fspo.lab.plan.shape import PlannedPack, Shape
from megatron_fspo.lab.plan.state import state
from megatron_fspo.mcore.machine.transformer_engine import attention_backend
from megatron_fspo.mcore.model.policy import Policy
from megatron_fspo.mcore.passes.decode import Decoder
from megatron_fspo.mcore.passes.fp8 import probe_fp8
from megatron_fspo.mcore.passes.score import score_sequences
from megatron_fspo.mcore.state.offload import Offload
from megatron_fspo.packing.batch import MicroBatches
from megatron_fspo.parallel.head import triton_problem
from megatron_fspo.rollout.embedded import EmbeddedEngine
from megatron_fspo.types import Prompt, SamplingParams
from passes import new_groups, scoring_of


def step(recipe: str) -> dict[str, Any]:
    """The second of two optimizer steps; ``recipe`` none is bf16. On one rank or, optimizer spread, many."""
    size, precision = SIZES.step, FP8(recipe=recipe)  # type: ignore[arg-type]
    new_groups(ALONE, best_layers())
    ranks = dist.get_world_size()
    least = torch.tensor(torch.cuda.mem_get_info()[0], device="cuda")
    dist.all_reduce(least, op=dist.ReduceOp.MIN)  # all are to build the same model
    free = int(least)
    fit = layers_that_fit(
        size.model, free, tokens=size.max_tokens, ranks=ranks, fp8=precision.recipe != "none"
    )
    arch = replace(size.model, num_layers=min(fit, size.layers))
    policy = build(
        arch,
        best_layers(),
        parallel=Parallel(distributed_optimizer=ranks > 1),
        fp8=precision,
        recompute=True,
        train=True,
    )
    modules = probe_fp8(policy)
    torch.cuda.reset_peak_memory_stats()
    batches = step_micro_batches(policy, size)
    for _ in range(2):
        scored, old_seconds = timed(lambda: old_pass(policy, batches))
        (s, norm), seconds = timed(lambda scored=scored: update(policy, scored))
    peak = torch.cuda.max_memory_allocated()
    syncs = {
        name: _host_syncs(work)
        for name, work in {
            "update": lambda: update(policy, scored),
            "old_pass": lambda: old_pass(policy, batches),
        }.items()
    }
    tokens = sum(prompt + response for prompt, response in size.shapes)
    matrices = arch.num_layers * arch.layer_size + arch.vocab_size * arch.hidden_size
    return {
        "layers": arch.num_layers,
        "of": size.model.num_layers,
        "kind": policy.backend.layers,
        "ranks": ranks,
        "modules": modules,
        "s": s,
        "grad_norm": norm,
        "old_seconds": old_seconds,
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / (old_seconds + seconds),
        # Without attention and what recomputing adds: what the model needs, not what was done.
        "tflops": 6 * matrices * tokens / seconds / ranks / 1e12,
        "peak": peak,
        "planned": _planned(policy, batches, ranks),
        "syncs": syncs,
        "micro_batches": len(batches),
        "state": state_bytes(arch, ranks=ranks, fp8=precision.recipe != "none"),
        "free": free,
        **_lent(policy),
    }


def _planned(policy: Policy, batches: MicroBatches, ranks: int) -> float:
    """Bytes that ``plan`` gives the largest of the micro-batches."""
    shape = Shape(
        arch=policy.arch,
        parallel=policy.parallel,
        world=ranks,
        dtype=torch.bfloat16,
        layers=policy.backend.layers,
        device="cuda",
        recompute=True,
        fp8=probe_fp8(policy) > 0,
        kernels=triton_problem(policy.backend.device, torch.bfloat16) is None,
    )
    most = 0.0
    for batch in batches:
        pack = PlannedPack(lengths=tuple(batch.borders.diff().tolist()), scored=int(batch.loss_mask.sum()))
        step = activations(shape, 0, pack, len(batches))
        most = max(most, step.held + max(step.moments.values()))
    copies = 2 * policy.arch.num_layers * policy.arch.layer_size if shape.fp8 else 0
    return most + sum(vars(state(shape, 0)).values()) + copies


def _host_syncs(work: Callable[[], Any]) -> dict[str, int]:
    """Where the host waits for the GPU, as torch's debug mode sees it, and how often; not in these files."""
    if FAKE:
        return {}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Counter(
        f"{Path(one.filename).name}:{one.lineno}"
        for one in seen
        if "synchronizing" in str(one.message) and Path(one.filename).parent != Path(__file__).parent
    )


def _lent(policy: Policy) -> dict[str, Any]:
    """Give all of the policy's memory to servers and take it back."""
    offload = Offload(policy)
    weights = [p.detach().clone() for chunk in policy.chunks for p in chunk.parameters()][:8]
    held = torch.cuda.memory_allocated()
    _, lend_seconds = timed(lambda: offload.hold(weights=False, rest=False))
    left = torch.cuda.memory_allocated()
    _, back_seconds = timed(lambda: offload.hold(weights=True, rest=True))
    found = [p for chunk in policy.chunks for p in chunk.parameters()][:8]
    return {
        "held": held,
        "left": left,
        "lend_seconds": lend_seconds,
        "back_seconds": back_seconds,
        "kept": all(torch.equal(a, b) for a, b in zip(weights, found, strict=True)),
    }


def decoding() -> dict[str, Any]:
    """Responses sampled by the model in training; log-probs as the training pass has them."""
    size = SIZES.decoding
    model = build(size.model, best_layers())
    decoder = Decoder(model.chunks, model.groups, vocab_size=size.model.vocab_size)
    rows = size.sequences
    engine = EmbeddedEngine(decoder, max_batch=rows)
    ids = torch.arange(rows * size.prompt).remainder(size.model.vocab_size).view(rows, size.prompt)
    prompts = [
        Prompt(index=i, token_ids=tuple(row), text="", answer="") for i, row in enumerate(ids.tolist())
    ]
    params = SamplingParams(
        n=1, max_tokens=size.response, temperature=1.0, stop_token_ids=(size.model.vocab_size,), seed=1
    )
    engine.submit(prompts[:2], params)()
    found, seconds = timed(lambda: engine.submit(prompts, params)())
    sampled = [completion for row in found for completion in row]
    lengths = [len(completion.token_ids) for completion in sampled]
    assert set(lengths) == {size.response}
    return {
        "kind": model.backend.layers,
        "rows": rows,
        "tokens": sum(lengths),
        "seconds": seconds,
        "gap": _gap(model, prompts, sampled),
    }


def _gap(model: Any, prompts: list[Prompt], sampled: list[Any]) -> float:
    """σ per token between sampled log-probs and those of the training pass."""
    found = score_sequences(
        lambda batches: model.score(batches, scoring_of(model, 1.0)),
        [[*p.token_ids, *c.token_ids] for p, c in zip(prompts, sampled, strict=True)],
        arch=model.arch,
        groups=model.groups,
        parallel=model.parallel,
        device=model.backend.device,
    )
    assert found is not None
    gaps = [
        values[len(p.token_ids) - 1 :] - torch.tensor(c.log_probs)
        for values, p, c in zip(found, prompts, sampled, strict=True)
    ]
    return torch.cat(gaps).double().square().mean().sqrt().item()


LONG = {
    "chunks": partial(ours, kind="torch"),
    **{f"kernels {gib}": partial(kernels, gib) for gib in (0, 1, 16)},
}
"""The head on a micro-batch of full length, by what its kernels may keep, in GiB."""


def head(variant: str) -> dict[str, Any]:
    """Log-probs and both gradients from hidden states: memory above the inputs, time, and what was found."""
    new_groups(ALONE, "local")
    hidden, weight, labels, upstream = head_inputs(SIZES.long_head if variant in LONG else SIZES.head)
    run = (VARIANTS | LONG)[variant]

    def once() -> Tensor:
        hidden.grad = weight.grad = None
        log_probs = run(hidden, weight, labels)
        log_probs.backward(upstream.to(log_probs.dtype))
        return log_probs.detach()

    once()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    log_probs, _ = timed(once)
    peak = torch.cuda.max_memory_allocated() - before
    seconds = min(timed(once)[1] for _ in range(5))
    some = slice(0, min(len(labels), 512))
    exact = torch.log_softmax(hidden[some].double() @ weight.double().t(), -1)
    want = exact.gather(-1, labels[some, None])[:, 0]
    assert hidden.grad is not None and weight.grad is not None
    assert math.isfinite(weight.grad.float().norm().item())
    return {
        "seconds": seconds,
        "peak": peak,
        "error": (log_probs[some].double() - want).abs().max().item(),
    }


def communicators() -> dict[str, Any]:
    """Bytes of the GPU, as its driver counts them: of CUDA, of a job's groups, of one group more."""

    def used() -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free

    torch.ones(1, device="cuda")
    seen = [used()]
    new_groups(ALONE, "local")
    dist.all_reduce(torch.ones(1, device="cuda"))
    groups = len(dist.distributed_c10d._world.pg_map)
    seen.append(used())
    dist.all_reduce(torch.ones(1, device="cuda"), group=dist.new_group())
    seen.append(used())
    return {"context": seen[0], "groups": groups, "all": seen[1] - seen[0], "one": seen[2] - seen[1]}


def ring(layers: str) -> dict[str, Any]:
    """On two ranks: log-probs under context parallel, and without."""
    size = SIZES.ring
    arch, spread = size.model, Parallel(context=2)
    alone = scores(build(arch, layers), size)
    model = build(arch, layers, parallel=spread)
    found, seconds = timed(lambda: scores(model, size))
    gaps = (found - alone).double()
    return {
        "attention": attention_backend(
            num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            max_tokens=size.max_tokens,
            context=2,
        )
        if layers == "transformer_engine"
        else layers,
        "sigma": gaps.square().mean().sqrt().item(),
        "mean": gaps.mean().item(),
        "tokens": len(found),
        "seconds": seconds,
    }
