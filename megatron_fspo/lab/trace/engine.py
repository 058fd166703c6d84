"""Transformer Engine without its kernels: its Python runs, and its compiled extension gives tensors of the
right shapes. ``tex.json`` has the names and enums of the extension of version 2.20."""

from __future__ import annotations

import enum
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_fspo.lab.trace.watch import Watch

NAMES = Path(__file__).with_name("tex.json")
_DTYPES = {4: torch.float32, 5: torch.float16, 6: torch.bfloat16}


def install(watch: Watch) -> None:
    """Have ``import transformer_engine`` find this extension. To be called before that import."""
    known = json.loads(NAMES.read_text(encoding="utf-8"))
    extension = ModuleType("transformer_engine_torch")
    for name, members in known["enums"].items():
        setattr(extension, name, enum.IntEnum(name, members))
    backends = known["enums"]["NVTE_Fused_Attn_Backend"]
    fused = backends["NVTE_F16_arbitrary_seqlen"]
    functions = _kernels(watch) | {
        "get_fused_attn_backend": lambda *_: (fused, ""),
        "get_cublasLt_version": lambda: 130000,
        "get_cudnn_version": lambda: 92000,
        "get_num_cublas_streams": lambda: 4,
    }
    for name in known["names"]:
        if name[0].isupper():
            setattr(extension, name, type(name, (), {}))
        else:
            setattr(extension, name, functions.get(name) or _missing(name))
    sys.modules["transformer_engine_torch"] = extension
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # transformer_engine.common loads no shared library
    import transformer_engine.common as common

    common.load_framework_extension = lambda *_: None
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    choose = utils.get_attention_backend

    def choose_for_tensors(params: Any) -> Any:
        params.qkv_type = Tensor if params.qkv_type is FakeTensor else params.qkv_type
        return choose(params)

    utils.get_attention_backend = choose_for_tensors


def is_there() -> bool:
    """Return True if Transformer Engine's Python is installed."""
    return PathFinder.find_spec("transformer_engine") is not None


def _missing(name: str) -> Callable[..., Any]:
    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{name} of Transformer Engine's extension has no stand-in")

    return missing


def _kernels(watch: Watch) -> dict[str, Callable[..., Any]]:
    kernels: dict[str, Callable[..., Any]] = {
        "generic_gemm": _gemm(watch),
        "te_general_grouped_gemm": _grouped_gemm(watch),
        "fused_attn_fwd": _attention(watch),
        "fused_attn_bwd": _attention_backward(watch),
        "quantize": _quantize,
        "create_empty_quantized_tensor": _empty_quantized,
        "split_quantize": lambda x, sizes, quantizers, *_: [
            _quantize(part, quantizer)
            for part, quantizer in zip(x.split(list(sizes)), quantizers, strict=True)
        ],
        "bgrad_quantize": lambda x, quantizer: (x.new_empty(x.shape[-1]), _quantize(x, quantizer)),
        "dequantize": lambda x, dtype: torch.empty(x.size(), dtype=_dtype(dtype, x.dtype), device="cuda"),
        "fp8_transpose": lambda x, dtype, out=None: (
            x.new_empty(x.shape[-1], *x.shape[:-1]) if out is None else out
        ),
        "swap_first_dims": lambda x, out=None: (
            x.new_empty(x.shape[1], x.shape[0], *x.shape[2:]) if out is None else out
        ),
        "rmsnorm_fwd": _norm,
        "rmsnorm_bwd": lambda dz, x, inverse, weight, *_: [torch.empty_like(x), torch.empty_like(weight)],
        "fused_rope_forward": lambda t, *_: torch.empty_like(t, memory_format=torch.contiguous_format),
        "fused_rope_backward": lambda t, *_: torch.empty_like(t, memory_format=torch.contiguous_format),
        "multi_tensor_l2norm": lambda chunk, noop, lists, per_tensor=False: (
            noop.new_ones(1, dtype=torch.float32),
            noop.new_ones(len(lists[0]), dtype=torch.float32),
        ),
        "compute_amax": lambda *_: None,
        "thd_read_half_tensor": lambda t, borders, half: (
            t.new_empty(t.shape[0] // 2, *t.shape[1:])
            if t.dim() == 3
            else t.new_empty(t.shape[0], t.shape[1] // 2, *t.shape[2:])
        ),
        "thd_read_second_half_lse": lambda lse, borders, packed, length: lse.new_empty(
            *lse.shape[:-1], lse.shape[-1] // 2
        ),
        "thd_get_partitioned_indices": lambda borders, tokens, size, rank: torch.empty(
            tokens // size, dtype=torch.int32, device="cuda"
        ),
    }
    in_place = ("adam", "scale", "scale_tensor", "compute_scale_and_scale_inv")
    kernels |= dict.fromkeys((f"multi_tensor_{name}" for name in in_place), lambda *_, **__: None)
    corrections = ("second_half_lse_correction", "out_correction", "grad_correction")
    kernels |= dict.fromkeys((f"thd_{name}" for name in corrections), lambda *_, **__: None)
    kernels["fused_amax_and_scale_update_after_reduction"] = lambda *_, **__: None
    return {name: watch.kernel(function) for name, function in kernels.items()}


def _dtype(which: Any, otherwise: torch.dtype) -> torch.dtype:
    if which is None:
        return otherwise
    return which if isinstance(which, torch.dtype) else _DTYPES[int(which)]


def _quantize(x: Tensor, quantizer: Any, out: Any = None, noop: Any = None) -> Any:
    return quantizer.make_empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out


def _empty_quantized(quantizer: Any, shape: list[int], dtype: torch.dtype, device: Any, *_: Any) -> Any:
    """Return a tensor in FP8: of each way in which it is read the values, a byte each, and their scales."""
    from transformer_engine.pytorch import tensor as kinds

    def empty(size: Any, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)

    kind = type(quantizer).__name__
    parts: dict[str, Any] = {"fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    if kind in ("Float8Quantizer", "Float8CurrentScalingQuantizer"):
        name = "Float8Tensor"
        parts["fp8_scale_inv"] = empty((1,), torch.float32)
        parts["data"] = empty(shape) if quantizer.rowwise_usage else None
        parts["data_transpose"] = empty((shape[-1], *shape[:-1])) if quantizer.columnwise_usage else None
    else:
        blocks = kind == "Float8BlockQuantizer"
        name = "Float8BlockwiseQTensor" if blocks else "MXFP8Tensor"
        if blocks:
            parts["is_2D_scaled"] = quantizer.block_scaling_dim == 2
        else:
            parts["with_gemm_swizzled_scales"] = False
        for way, columnwise in (("rowwise", False), ("columnwise", True)):
            used = getattr(quantizer, f"{way}_usage")
            values = quantizer.get_columnwise_shape(shape) if blocks and columnwise else shape
            scales = quantizer.get_scale_shape(shape, columnwise)
            parts[f"{way}_data"] = empty(values) if used else None
            parts[f"{way}_scale_inv"] = (
                empty(scales, torch.float32 if blocks else torch.uint8) if used else None
            )
    if quantizer.internal:
        return getattr(kinds, f"{name}Storage")(**parts, fake_dtype=dtype)
    return getattr(kinds, name)(shape=shape, dtype=dtype, device=device, **parts)


def _norm(x: Tensor, weight: Tensor, eps: float, out: Any, quantizer: Any, dtype: Any, *_: Any) -> list[Any]:
    if out is None:
        out = x.new_empty(x.shape, dtype=_dtype(dtype, x.dtype))
        if quantizer is not None:
            out = _quantize(out, quantizer)
    return [out, None, x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)]


def _gemm(watch: Watch) -> Callable[..., Any]:
    def generic_gemm(*args: Any, extra_output: Tensor | None = None, **more: Any) -> list[Any]:
        """Return op(b) op(a), as cuBLAS names it."""
        a, transpose_a, b, transpose_b, out, _, out_dtype, bias, _, _, _, grad, *_ = args
        first, second = a.size(), b.size()
        rows_a, rows_b = first[:-1].numel(), second[:-1].numel()
        inner, columns = (first[-1], rows_a) if transpose_a else (rows_a, first[-1])
        rows = second[-1] if transpose_b else rows_b
        watch.count_product(rows, inner, columns)
        if out is None:
            shape = (rows, columns) if transpose_b else (*second[:-1], columns)
            out = torch.empty(shape, dtype=_dtype(out_dtype, torch.bfloat16), device="cuda")
        bias_gradient = bias.new_empty(bias.shape) if bias is not None and grad else None
        return [out, bias_gradient, None, extra_output]

    return generic_gemm


def _grouped_gemm(watch: Watch) -> Callable[..., Any]:
    def te_general_grouped_gemm(
        a: Sequence[Tensor], transpose_a: bool, b: Sequence[Tensor], transpose_b: bool, *args: Any
    ) -> Any:
        """Return a product for each expert, into tensors that are there."""
        for first, second in zip(a, b, strict=True):
            rows_a, rows_b = first.size()[:-1].numel(), second.size()[:-1].numel()
            inner, columns = (first.size()[-1], rows_a) if transpose_a else (rows_a, first.size()[-1])
            watch.count_product(second.size()[-1] if transpose_b else rows_b, inner, columns)
        return args[3]  # the biases, or their gradients

    return te_general_grouped_gemm


def _attention(watch: Watch) -> Callable[..., Any]:
    def fused_attn_fwd(longest: int, _: int, training: bool, *args: Any) -> Sequence[Any]:
        borders, q, v, sinks = args[11], args[13], args[15], args[24]
        watch.count_attention(borders, q, 2)
        out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=_dtype(args[16], torch.bfloat16))
        # Per token and head the log of the sum; a seed and an offset.
        sums = torch.empty(q.shape[0], q.shape[1], 1, dtype=torch.float32, device="cuda")
        seed = torch.empty(2, dtype=torch.int64, device="cuda")
        return [out, sums, seed, *([] if sinks is None else [sinks])] if training else [out]

    return fused_attn_fwd


def _attention_backward(watch: Watch) -> Callable[..., Any]:
    def fused_attn_bwd(longest: int, _: int, *args: Any) -> Sequence[Any]:
        borders, q, k, v = args[15], args[17], args[18], args[19]
        watch.count_attention(borders, q, 5)
        _, _, *sinks = args[23]
        slopes = [torch.empty(t.shape, dtype=torch.bfloat16, device="cuda") for t in (q, k, v)]
        return [*slopes, None, torch.empty_like(sinks[0]) if sinks else None]

    return fused_attn_bwd
