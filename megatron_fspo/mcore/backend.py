"""Device, collectives and layers of this machine: the one file where CPU and CUDA part ways.

| | CPU | CUDA |
|---|---|---|
| collectives | gloo | NCCL |
| layers | Megatron's local layers, our norm and attention | Transformer Engine (or local) |
| fusions | off | on where the layers offer them |
"""

from __future__ import annotations

import importlib.util
import os
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fspo.errors import InputError
from megatron_fspo.mcore import cpu
from megatron_fspo.mcore.engine import engine_problem
from megatron_fspo.mcore.layers import local_block_spec

CUDA_ENVIRONMENT = {
    # Kernels begin in the order in which they were asked for: a collective before the matrix product that is
    # to hide it. Megatron's overlap in tensor and context parallel layers counts on that.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
"""Variables that CUDA reads when it starts, unless the user has set them."""
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


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Device, collectives and layers of this process."""

    device: torch.device
    collectives: Literal["gloo", "nccl"]
    layers: Literal["local", "transformer_engine"]

    def install(self) -> None:
        """Prepare this process. Before any model is built."""
        if self.device.type == "cpu":
            cpu.install()
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        else:
            torch.cuda.set_device(self.device)

    def busy_seconds(self) -> float:
        """A clock of what this process computes, to be compared with itself. On a CPU it stands still while
        the thread waits; on a GPU it is read when all that was asked of the GPU is done."""
        if self.device.type == "cpu":
            return time.thread_time()
        torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def config_flags(self) -> dict[str, Any]:
        """The fields of ``TransformerConfig`` that depend on the machine."""
        fused = self.layers == "transformer_engine"
        return {
            # Parameters are allocated where they stay.
            "use_cpu_initialization": False,
            "bias_activation_fusion": fused,
            "bias_dropout_fusion": fused,
            "apply_rope_fusion": fused,
            "masked_softmax_fusion": False,
            "persist_layer_norm": fused,
            # Megatron's own layers need apex's kernel for it; Transformer Engine's have theirs: see
            # wrap_for_training.
            "gradient_accumulation_fusion": self.device.type == "cuda"
            and not fused
            and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        }

    def layer_spec(self, config: TransformerConfig, vp_stage: int | None = None) -> Any:
        """The layers, as Megatron wants them; ``vp_stage`` is the virtual pipeline stage they are for."""
        if self.layers == "transformer_engine":
            return get_gpt_layer_with_transformer_engine_spec(
                num_experts=config.num_moe_experts,
                moe_grouped_gemm=config.moe_grouped_gemm,
                qk_layernorm=config.qk_layernorm,
            )
        return local_block_spec(config, vp_stage)


def choose_backend(
    backend: Literal["auto", "cpu", "cuda"] = "auto",
    layers: Literal["auto", "local", "transformer_engine"] = "auto",
) -> Backend:
    """Resolve the two keys ``model.backend`` and ``model.layers`` on this machine.

    Raises:
        InputError: what was asked for is not here. Nothing falls back silently.
    """
    if backend != "cpu":
        for name, value in CUDA_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    if backend == "auto":
        backend = "cuda" if torch.cuda.is_available() else "cpu"
    if backend == "cpu":
        return Backend(device=torch.device("cpu"), collectives="gloo", layers="local")
    if not torch.cuda.is_available():
        raise InputError(
            "model.backend = cuda, but torch sees no GPU here. Run on a GPU node with a CUDA build of torch, "
            "or try the small CPU run: --smoke with the launch script, or `make demo`."
        )
    if layers == "auto":
        layers = "transformer_engine"
    if layers == "transformer_engine" and (problem := engine_problem()) is not None:
        raise InputError(
            f"model.layers = transformer_engine, but {problem}. Install the extra `te`, or set "
            "model.layers = local."
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return Backend(device=device, collectives="nccl", layers=layers)


def check_dtype(backend: Backend, dtype: torch.dtype) -> None:
    """Raise ``InputError`` where the layers cannot train in ``dtype``.

    In float32 Transformer Engine has no fast attention: memory grows with the square of the length, and
    there is none with context parallel.
    """
    if backend.layers == "transformer_engine" and dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise InputError(
            f"model.dtype = {name}, but model.layers = transformer_engine needs bfloat16: set model.dtype = "
            "bfloat16, or model.layers = local"
        )


def peak_tflops(backend: Backend, dtype: torch.dtype) -> float | None:
    """Most TFLOP/s of one rank's GPU; None where that is not known, as on a CPU."""
    if backend.device.type != "cuda" or dtype != torch.bfloat16:
        return None
    return peak_of(torch.cuda.get_device_name(backend.device))


def peak_of(name: str) -> float | None:
    """TFLOP/s in bf16 of a GPU of this name."""
    return next((peak for part, peak in _DENSE_BF16 if part in name), None)
