"""A double of Transformer Engine's compiled extension: its names and enums, and the kernels we need in torch.

``tex.json`` has the names and enums of the real one; ``dump_tex.py`` wrote it. A function that is not here
raises, with its name.
"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_NAMES = Path(__file__).parents[3] / "megatron_fspo/lab/trace/tex.json"
_KNOWN = json.loads(_NAMES.read_text(encoding="utf-8"))
_DTYPES = {4: torch.float32, 5: torch.float16, 6: torch.bfloat16}
_THD, _SBHD = (_KNOWN["enums"]["NVTE_QKV_Format"][f"NVTE_{name}"] for name in ("THD", "SBHD"))


@cache
def module() -> ModuleType:
    """The module that ``import transformer_engine_torch`` gives."""
    made = ModuleType("transformer_engine_torch")
    for name, members in _KNOWN["enums"].items():
        setattr(made, name, enum.IntEnum(name, members))
    for name in _KNOWN["names"]:
        known = None if os.environ.get("FAKE_KERNELS") == "none" else globals().get(name)
        setattr(made, name, known or (type(name, (), {}) if name[0].isupper() else _kernel(name)))
    return made


def _kernel(name: str) -> Callable[..., Any]:
    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{name} of Transformer Engine's extension runs on a GPU only")

    return missing


def _precise(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _dtype(which: Any, otherwise: torch.dtype) -> torch.dtype:
    if which is None:
        return otherwise
    return which if isinstance(which, torch.dtype) else _DTYPES[int(which)]


def generic_gemm(
    a: Tensor,
    transpose_a: bool,
    b: Tensor,
    transpose_b: bool,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Tensor | None]:
    """op(b) op(a), column-major as cuBLAS names it: products in fp32 at least, rounded once."""
    assert quantizer is None and not gelu and comm_overlap is None and alpha == 1.0
    # Quantised tensors must not get here: the reference quantisers bring a product of their own.
    assert {type(a), type(b)} <= {Tensor, torch.nn.Parameter}, (type(a), type(b))
    right, left = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    found_dtype = _dtype(out_dtype, a.dtype if out is None else out.dtype)
    exact = torch.promote_types(found_dtype, torch.float32)
    right, left = (right.t() if transpose_a else right), (left.t() if transpose_b else left)
    product = left.to(exact) @ right.to(exact)
    bias_gradient = None
    if bias is not None and grad:
        bias_gradient = b.reshape(-1, b.shape[-1]).to(exact).sum(0).to(bias.dtype)
    elif bias is not None:
        product = product + bias.to(exact)
    if not transpose_b:
        product = product.reshape(*b.shape[:-1], product.shape[-1])
    if out is None:
        return [product.to(found_dtype), bias_gradient, None, extra_output]
    if accumulate:
        out.add_(product.to(out.dtype).view_as(out))
    else:
        out.copy_(product.view_as(out))
    return [out, bias_gradient, None, extra_output]


def te_general_grouped_gemm(
    a: Sequence[Tensor],
    transpose_a: bool,
    b: Sequence[Tensor],
    transpose_b: bool,
    out: Sequence[Tensor],
    out_dtype: Any,
    splits: Sequence[int],
    bias: Sequence[Tensor],
    bias_dtype: Any,
    single_output: bool,
    gelu_in: Any,
    grad: bool,
    workspaces: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    sms: int,
) -> Sequence[Tensor]:
    """One product per expert."""
    outs = torch.split(out[0], list(splits)) if single_output else out
    for i, (left, right, into) in enumerate(zip(a, b, outs, strict=True)):
        here = bias[i] if bias and bias[i] is not None and bias[i].numel() else None
        arguments = (None, None, out_dtype, here, bias_dtype, False, None, grad, None, 0, False, False)
        product, *_ = generic_gemm(left, transpose_a, right, transpose_b, *arguments)
        assert product is not None
        (into.add_ if accumulate else into.copy_)(product.view_as(into))
    return bias


def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer: Any,
    dtype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """x / rms(x) · weight, and 1 / rms."""
    exact = x.to(_precise(x))
    inverse = torch.rsqrt(exact.square().mean(-1) + eps)
    gamma = weight.to(exact.dtype) + zero_centered_gamma
    y: Any = (exact * inverse[..., None] * gamma).to(_dtype(dtype, x.dtype))
    if quantizer is not None:
        y = quantizer.quantize(y)
    if out is not None:
        y = out.copy_(y)
    return [y, None, inverse]


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    """Gradients of x and of the weight."""
    exact, upstream = x.to(_precise(x)), dz.to(_precise(x))
    gamma = weight.to(exact.dtype) + zero_centered_gamma
    normal = exact * inverse[..., None]
    into_weight = (upstream * normal).reshape(-1, x.shape[-1]).sum(0)
    scaled = upstream * gamma
    into_x = inverse[..., None] * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    return [into_x.to(x.dtype), into_weight.to(weight.dtype)]


def fused_rope_forward(
    t: Tensor,
    freqs: Tensor,
    start: Any,
    layout: Any,
    interleaved: bool,
    borders: Tensor | None,
    cp_size: int,
    cp_rank: int,
    sign: float = 1.0,
) -> Tensor:
    """Rotate the first features of each head by its position's angles."""
    assert start is None and not interleaved and cp_size == 1
    if int(layout) == _SBHD:
        positions = torch.arange(t.shape[0])
    else:
        assert int(layout) == _THD and borders is not None
        positions = torch.cat([torch.arange(length) for length in borders.diff().tolist()])
    assert not len(positions) or int(positions.max()) < freqs.shape[0], "fewer angles than positions"
    angles = freqs[positions].to(_precise(t))
    if int(layout) == _THD:
        angles = angles[:, 0]
    rotated, rest = t[..., : angles.shape[-1]].to(angles.dtype), t[..., angles.shape[-1] :]
    first, second = rotated.chunk(2, -1)
    turned = rotated * angles.cos() + sign * torch.cat([-second, first], -1) * angles.sin()
    return torch.cat([turned.to(t.dtype), rest], -1)


def fused_rope_backward(*arguments: Any) -> Tensor:
    """The transpose of a rotation: the one by the opposite angles, as both halves share their angles."""
    return fused_rope_forward(*arguments, sign=-1.0)


def convert_thd_to_bshd(t: Tensor, borders: Tensor, batch: int, longest: int) -> Tensor:
    """Packed rows → one padded row per sequence."""
    out = t.new_zeros(batch, longest, *t.shape[1:])
    edges = borders.tolist()
    for i, (first, end) in enumerate(pairwise(edges)):
        out[i, : end - first] = t[first:end]
    return out


def convert_bshd_to_thd(t: Tensor, borders: Tensor, tokens: int) -> Tensor:
    """One padded row per sequence → packed rows."""
    out = t.new_zeros(tokens, *t.shape[2:])
    edges = borders.tolist()
    for i, (first, end) in enumerate(pairwise(edges)):
        out[first:end] = t[i, : end - first]
    return out


def multi_tensor_l2norm(
    chunk: int, noop: Any, lists: Sequence[Sequence[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """The norm over all tensors, and those of each."""
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return norms.norm()[None], norms if per_tensor else torch.empty(0)


def multi_tensor_scale(
    chunk: int, noop: Any, lists: Sequence[Sequence[Tensor]], scale: float | Tensor
) -> None:
    """The second of each pair is the first times ``scale``."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


multi_tensor_scale_tensor = multi_tensor_scale


def multi_tensor_adam(
    chunk: int,
    noop: Any,
    lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: bool,
    weight_decay: float,
    *_: Any,
) -> None:
    """Adam (mode 0: L2 penalty) or AdamW (1), on the masters where there are any."""
    grads, parameters, means, squares = lists[:4]
    masters = lists[4] if len(lists) > 4 else parameters
    unbias = [1 - beta**step if bias_correction else 1.0 for beta in (beta1, beta2)]
    for grad, parameter, mean, square, master in zip(grads, parameters, means, squares, masters, strict=True):
        gradient = grad.float() + (weight_decay * master if mode == 0 else 0.0)
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        change = (mean / unbias[0]) / ((square / unbias[1]).sqrt() + eps)
        if mode == 1:
            change = change + weight_decay * master
        master.sub_(lr * change)
        if master is not parameter:
            parameter.copy_(master)


def get_num_cublas_streams() -> int:
    """Streams of grouped products."""
    return 1


def get_cublasLt_version() -> int:
    """13.0."""
    return 130000


def get_cudnn_version() -> int:
    """9.20."""
    return 92000


def get_fused_attn_backend(*_: Any) -> tuple[int, str]:
    """None: what is left is Transformer Engine's attention in torch."""
    return _KNOWN["enums"]["NVTE_Fused_Attn_Backend"]["NVTE_No_Backend"], "there is no cuDNN"
