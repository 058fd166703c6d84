"""FP8 as this GPU does it: its quantizers, and a model's log-probs."""

from __future__ import annotations

from typing import Any

import torch
from gpu_models import ALONE, build, old_pass, scores, step_micro_batches, update
from gpu_sizes import SIZES
from torch import Tensor

from backend import FAKE
from megatron_fspo.config.fp8 import FP8
from megatron_fspo.lab.calibrate.emulate import emulate_fp8
from megatron_fspo.lab.calibrate.fp8_values import through_fp8
from megatron_fspo.mcore.passes.fp8 import check_fp8, probe_fp8


def quantizer(recipe: str) -> dict[str, Any]:
    """Count the values that a kernel and :mod:`fp8_values` disagree on, by precision and factor."""
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        for weight in (False, True):
            values = _values(dtype)
            want, got = through_fp8(values, recipe, weight=weight), _native(values, recipe, weight=weight)
            assert got.dtype == want.dtype and got.shape == want.shape
            name = f"{str(dtype).removeprefix('torch.')}, {'weight' if weight else 'activation'}"
            found[name] = int((got != want).sum())
            assert not torch.equal(want, values), "nothing was quantized"
    return {"unequal": found, "values": values.numel()}


def _values(dtype: torch.dtype) -> Tensor:
    """Normal numbers; sizes from 1e-4 to 1e4 by blocks of 32, and a row of blocks of zeros."""
    torch.manual_seed(0)
    rows, columns = SIZES.quantized
    sizes = 10.0 ** torch.empty(rows, columns // 32, device="cuda").uniform_(-4, 4)
    sizes[: rows // 2] = 1.0
    sizes[-1] = 0.0
    return (torch.randn(rows, columns, device="cuda") * sizes.repeat_interleave(32, 1)).to(dtype)


def _native(values: Tensor, recipe: str, *, weight: bool) -> Tensor:
    """Through FP8 by the kernels that layers use; on a fake GPU by the reference quantizer."""
    if FAKE:
        from transformer_engine.pytorch.custom_recipes import reference_current_scaling as reference

        assert recipe == "tensorwise"
        made = reference.current_scaling_ref_factory(None).quantize(values)
        return (made.data.float() * made.scale).to(values.dtype)
    import transformer_engine.pytorch as engine
    import transformer_engine_torch as tex

    e4m3 = tex.DType.kFloat8E4M3
    quantizers: dict[str, Any] = {
        "tensorwise": lambda: engine.Float8CurrentScalingQuantizer(e4m3, values.device, columnwise=False),
        "blockwise": lambda: engine.Float8BlockQuantizer(
            e4m3, rowwise=True, columnwise=False, block_scaling_dim=2 if weight else 1
        ),
        "mxfp8": lambda: engine.MXFP8Quantizer(e4m3, columnwise=False),
    }
    dequantized: Tensor = quantizers[recipe]().quantize(values).dequantize(dtype=values.dtype)
    return dequantized


def fp8(recipe: str) -> dict[str, Any]:
    """A policy in FP8 beside one in bf16, and beside one with emulated quantizers: per-token figures."""
    size, asked = SIZES.noise, FP8(recipe=recipe)  # type: ignore[arg-type]
    other = size.max_tokens // 2
    plain = build(size.model, "transformer_engine")
    base = scores(plain, size)
    found = {"packs_bf16": _spread(scores(plain, size, other) - base)}
    check_fp8(asked, plain.backend, size.model, ALONE)
    policy = build(size.model, "transformer_engine", fp8=asked, train=True)
    found["modules"], found["expected_modules"] = probe_fp8(policy), 4 * size.model.num_layers
    native = scores(policy, size)
    found["noise"], found["mean"] = _spread(native - base), (native - base).mean().item()
    found["packs"] = _spread(scores(policy, size, other) - native)
    emulated = build(size.model, "local")
    local = scores(emulated, size)
    found["layers"] = _spread(local - base)
    assert emulate_fp8(emulated, asked) == found["expected_modules"]
    found["emulated"] = _spread(scores(emulated, size) - local)
    found["alike"] = torch.corrcoef(torch.stack([native - base, scores(emulated, size) - local]))[0, 1].item()
    batches = step_micro_batches(policy, size)
    found["s"], found["grad_norm"] = update(policy, old_pass(policy, batches))
    found["moved"] = _spread(scores(policy, size) - native)
    found["later_s"], _ = update(policy, old_pass(policy, batches))
    return found


def _spread(gaps: Tensor) -> float:
    """σ per token, around 0."""
    return gaps.double().square().mean().sqrt().item()
