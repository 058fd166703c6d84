"""On two ranks: models before and after their weights are loaded, a step of decay alone, and an evaluation.

build_worker.py TIED UNTIED BIASED
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from backend import BACKEND, ENGINE, LAYERS
from cases import samples
from launch import REPO
from megatron_fspo import config as options
from megatron_fspo.config.loading import load_config
from megatron_fspo.mcore.machine.backend import choose_backend
from megatron_fspo.mcore.machine.startup import start, stop
from megatron_fspo.mcore.model import policy as policy_module
from megatron_fspo.mcore.model.model import layer_offset
from megatron_fspo.mcore.model.policy import Model, Policy
from megatron_fspo.mcore.state.hf_weights import load_hf
from megatron_fspo.trainer.evaluate_checkpoint import evaluate_checkpoint
from megatron_fspo.trainer.prepare import prepare
from megatron_fspo.weights import read_architecture, resolve
from passes import build, make_micro_batches, scoring_of

CPU = choose_backend(BACKEND, LAYERS)
TENSOR, PIPELINE = options.Parallel(tensor=2, sequence=True), options.Parallel(pipeline=2)


def check(checkpoint: Path, parallel: options.Parallel, dtype: torch.dtype) -> None:
    groups = start(CPU, parallel=parallel, seed=1)
    arch = read_architecture(checkpoint)
    random_state = torch.get_rng_state()
    model = Model(arch, CPU, groups, parallel=parallel, dtype=dtype)
    policy = Policy(
        arch, CPU, groups, parallel=parallel, dtype=dtype, optimizer=options.Optimizer(weight_decay=0.0)
    )
    for built in (model, policy):
        (chunk,) = built.chunks
        assert not list(chunk.buffers()), "nothing would fill a buffer"
        assert all(p.isnan().all() for p in chunk.parameters() if p.ndim == 2)
        load_hf(built, checkpoint)
        assert all(p.isfinite().all() for p in chunk.parameters())
        for name, parameter in chunk.named_parameters():
            split = resolve(name, arch, layer_offset(built.config, chunk)).layout != "replicated"
            assert getattr(parameter, "tensor_model_parallel", False) is split, name
            assert hasattr(parameter, "main_grad") is (built is policy), name
    assert torch.equal(random_state, torch.get_rng_state()), "building a model drew random numbers"

    batches = make_micro_batches(model, samples(), 150)
    ours, theirs = (built.score(batches, scoring_of(built)) for built in (model, policy))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other) and not one.requires_grad
    stop()


def check_weight_decay(checkpoint: Path, kinds: Sequence[str], *, distributed: bool) -> None:
    """Without a gradient a step is the decay alone: of matrices, tables included, and of no norm or bias.

    Args:
        kinds: words in the names of what the model has.
    """
    parallel = options.Parallel(distributed_optimizer=distributed)
    policy = build(checkpoint, parallel, optimizer=options.Optimizer(lr=0.01, weight_decay=0.5))
    (chunk,) = policy.chunks
    before = {name: p.detach().clone() for name, p in chunk.named_parameters()}
    policy.zero_gradients()
    policy.step({}, policy.grad_norm())
    for name, parameter in chunk.named_parameters():
        left = 1.0 if "norm" in name or "bias" in name else 1 - 0.01 * 0.5
        want = before[name] * left
        assert (
            torch.allclose(parameter, want, rtol=1e-6, atol=0) if left < 1 else torch.equal(parameter, want)
        ), name
    assert all(any(kind in name for name in before) for kind in kinds)
    stop()


def check_evaluation() -> None:
    """The real function; with what would make gradient buffers or an optimizer out of order."""
    config = load_config(
        REPO / "examples/make_sum/run.toml",
        "--rollout.max-response-tokens 5 --evaluation.samples 1 --model.dtype bfloat16".split(),
    )
    inputs = prepare(config, world_size=2)
    training = ("wrap_for_training", "get_megatron_optimizer")
    with patch.multiple(policy_module, **dict.fromkeys(training)):
        metrics = evaluate_checkpoint(inputs)
    assert 0 <= metrics["val/validation/mean@1"] <= 1
    stop()


def main() -> None:
    *checkpoints, biased = map(Path, sys.argv[1:])
    tied, untied = checkpoints
    threads = []
    for checkpoint, parallel, dtype in (
        (tied, TENSOR, torch.float32),
        (untied, PIPELINE, torch.float32),
        (untied, TENSOR, torch.bfloat16),
        (tied, PIPELINE, torch.bfloat16),  # the last stage has a copy of the embedding
    ):
        check(checkpoint, parallel, dtype)
        threads.append(len(os.listdir("/proc/self/task")))
    # Every gloo group has three; with dozens of groups and layouts they would slow each other down.
    # Transformer Engine holds on to those of its layers.
    assert ENGINE or threads[-1] <= threads[0] + 3, threads
    for distributed in (False, True):
        check_weight_decay(checkpoints[0], ["norm", "embedding"], distributed=distributed)
        check_weight_decay(biased, ["norm", "embedding", "bias", "output_layer"], distributed=distributed)
    check_evaluation()
    assert not dist.is_initialized()
    print("held", flush=True)


if __name__ == "__main__":
    main()
