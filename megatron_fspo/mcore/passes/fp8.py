"""Checks that a run that requests FP8 gets it.

Megatron falls back silently: to delayed scaling for an unknown recipe, to bfloat16 without Transformer Engine
or in modules that cannot multiply in FP8. So we check the machine before building a model, and the modules
after a first short pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import is_first_last_bf16_layer
from torch.nn import Module

from megatron_fspo.config import Parallel
from megatron_fspo.config.fp8 import FP8
from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.mcore.machine.backend import Backend
from megatron_fspo.mcore.machine.transformer_engine import fp8_problems
from megatron_fspo.mcore.model.policy import Model
from megatron_fspo.mcore.model.policy_loss import Scoring
from megatron_fspo.mcore.passes.score import score_sequences
from megatron_fspo.weights import Architecture

LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Modules of a dense layer that multiply in FP8."""


def check_fp8(
    fp8: FP8, backend: Backend, arch: Architecture, parallel: Parallel, *, machine: bool = True
) -> None:
    """Raise ``InputError`` unless the model's sizes and, with ``machine``, this GPU support the recipe."""
    if fp8.recipe == "none":
        return
    asked = f"fp8.recipe = {fp8.recipe}"
    if backend.layers != "transformer_engine":
        raise InputError(f"{asked} needs layers of Transformer Engine; this run has {backend.layers} layers")
    problem = fp8_problems()[fp8.recipe] if machine else None
    if problem is not None:
        raise InputError(f"{asked} does not run on {torch.cuda.get_device_name()}: {problem}")
    if 2 * fp8.first_last_layers_bf16 >= arch.num_layers:
        raise InputError(
            f"fp8.first_last_layers_bf16 = {fp8.first_last_layers_bf16} leaves none of the model's "
            f"{arch.num_layers} layers in FP8"
        )
    if arch.experts is not None:
        raise InputError(f"{asked}: mixtures of experts ({arch.model_type}) are not supported")
    widths = {
        "hidden_size": arch.hidden_size,
        "query heads of a rank": arch.q_size // parallel.tensor,
        "query, key and value heads of a rank": (arch.q_size + 2 * arch.kv_size) // parallel.tensor,
        "intermediate_size of a rank": arch.ffn_size // parallel.tensor,
    }
    for name, width in widths.items():
        if width % fp8.width_align:
            raise InputError(f"{asked} needs multiples of {fp8.width_align}, but the model's {name}: {width}")


@contextmanager
def without_fp8(model: Model) -> Iterator[None]:
    """Context manager: the model multiplies in bfloat16, with its current weights."""
    fp8, model.config.fp8 = model.config.fp8, None
    try:
        yield
    finally:
        model.config.fp8 = fp8


def probe_fp8(model: Model) -> int:
    """Count the whole model's matrices that multiply in FP8, by a pass over two tokens. Collective.

    Raises:
        TrainingError: on every rank, if a matrix that should multiply in FP8 does not.
    """
    if model.fp8.recipe == "none":
        return 0
    scoring = Scoring(
        groups=model.groups, vocab_size=model.arch.vocab_size, temperature=1.0, head=model.backend.head
    )
    score_sequences(
        lambda batches: model.score(batches, scoring),
        [[0, 0]],
        arch=model.arch,
        groups=model.groups,
        parallel=model.parallel,
        device=model.backend.device,
        align=model.fp8.align,
    )
    count = 0
    wrong = ""
    for name, module in _linears(model):
        if bool(getattr(module, "fp8", False)):
            count += 1
        else:
            wrong = wrong or f"{name} ({type(module).__name__})"
    if model.groups.tp.rank() or model.groups.dp_cp.rank():
        count = 0  # only the first rank of each stage counts
    every: list[tuple[int, str]] = [(0, "")] * dist.get_world_size()
    dist.all_gather_object(every, (count, wrong))
    missing = [(rank, text) for rank, (_, text) in enumerate(every) if text]
    if missing:
        rank, text = missing[0]
        raise TrainingError(
            f"fp8.recipe = {model.fp8.recipe}, but {text} of rank {rank} multiplies in bfloat16; "
            f"{len(missing)} of {len(every)} ranks have such layers"
        )
    return sum(number for number, _ in every)


def _linears(model: Model) -> Iterator[tuple[str, Module]]:
    """Yield name and module of this rank's modules that should multiply in FP8."""
    for chunk in model.chunks:
        for layer in chunk.decoder.layers:
            if is_first_last_bf16_layer(model.config, layer.layer_number - 1):
                continue
            for name, module in layer.named_modules():
                if name.rpartition(".")[2] in LINEARS:
                    yield f"layer {layer.layer_number}, {name}", module
