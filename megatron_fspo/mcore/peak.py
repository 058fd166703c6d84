"""What a GPU can do at most, by its name."""

from __future__ import annotations

import torch

from megatron_fspo.mcore.backend import Backend

_DENSE_BF16 = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("H200", 989.0),
    ("H20", 148.0),
    ("B200", 2250.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
)
"""Part of the name → TFLOP/s of bf16 products without sparsity, from the vendor's data sheets; the first that
fits."""


def peak_tflops(backend: Backend, dtype: torch.dtype) -> float | None:
    """Of one rank's GPU; None where it is not known, as on a CPU."""
    if backend.device.type != "cuda" or dtype != torch.bfloat16:
        return None
    return peak_of(torch.cuda.get_device_name(backend.device))


def peak_of(name: str) -> float | None:
    """Of a GPU that calls itself so, in bf16."""
    return next((peak for part, peak in _DENSE_BF16 if part in name), None)
