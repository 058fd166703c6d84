"""Device, collectives and layers of this machine: the only file with separate code for CPU and CUDA.

| | CPU | CUDA |
|---|---|---|
| collectives | gloo | NCCL |
| layers | Megatron's local layers, our norm and attention | Transformer Engine (or local) |
| fusions | off | on where the layers offer them |

Megatron hard-codes ``device="cuda"`` in a few dozen places. Without a GPU we patch torch's tensor factories,
four tensor methods and a few CUDA calls, so that ``cuda`` means the CPU. (A torch function mode would be one
patch, but would slow down every call.) No class of Megatron is patched; norms and attention come through the
layer spec (:mod:`megatron_fspo.mcore.model.layers`).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Literal

import psutil
import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core import utils as megatron_utils
from megatron.core.optimizer import clip_grads, optimizer
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor
from torch.utils._device import _device_constructors

from megatron_fspo.errors import InputError
from megatron_fspo.mcore.machine.cpu_products import install_products, onednn_is_faster
from megatron_fspo.mcore.machine.transformer_engine import engine_problem
from megatron_fspo.parallel.head import HeadKind, tried, triton_problem

_JOB = os.environ.get("SLURM_JOB_ID", "job")
CUDA_ENVIRONMENT = {
    # Packs differ in length, which would fragment memory.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    # Not in a home folder on a network, where ranks lose each other's files ("stale file handle").
    "TRITON_CACHE_DIR": f"{tempfile.gettempdir()}/triton-{os.getuid()}-{_JOB}",
}
"""Defaults of environment variables that torch's allocator and Triton read later."""
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
"""Substring of the GPU's name → dense bf16 TFLOP/s from the vendor's data sheets; the first match counts."""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Device, collectives and layers of this process."""

    device: torch.device
    collectives: Literal["gloo", "nccl"]
    layers: Literal["local", "transformer_engine"]
    head: HeadKind = "auto"

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings to print at the start of a run."""
        if self.device.type == "cpu" or self.layers == "transformer_engine":
            return ()
        return (
            "model.layers = local is for debugging: the host waits for the GPU 7 times per layer and pass",
        )

    def install(self) -> None:
        """Prepare this process. Call it before building a model."""
        if self.device.type == "cpu":
            install_cpu()
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        else:
            torch.cuda.set_device(self.device)

    def busy_seconds(self) -> float:
        """Read a clock of this process's computation: on a CPU, the thread's CPU time, which excludes waits;
        on a GPU, wall time after a synchronization."""
        if self.device.type == "cpu":
            return time.thread_time()
        torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def use(self) -> dict[str, float]:
        """Return metrics of this rank: resident memory of the process in GiB; on a GPU also its memory in use
        by all programs, the peak of tensors since the last call, and the share of the last second in which
        it computed, if pynvml is installed."""
        use = {"perf/cpu_memory": psutil.Process().memory_info().rss / 2**30}
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            use["perf/gpu_memory_used"] = (total - free) / 2**30
            use["perf/gpu_memory_peak"] = torch.cuda.max_memory_allocated(self.device) / 2**30
            torch.cuda.reset_peak_memory_stats(self.device)
            with suppress(Exception):  # no pynvml, or a slice of a GPU (MIG), which does not count it
                use["perf/gpu_utilization"] = torch.cuda.utilization(self.device) / 100
        return use

    def config_flags(self) -> dict[str, Any]:
        """Return the fields of ``TransformerConfig`` that depend on the machine."""
        fused = self.layers == "transformer_engine"
        return {
            # Allocate parameters on the device.
            "use_cpu_initialization": False,
            "bias_activation_fusion": fused,
            "bias_dropout_fusion": fused,
            "apply_rope_fusion": fused,
            "masked_softmax_fusion": False,
            "persist_layer_norm": fused,
            # Megatron's own layers need apex's kernel. For Transformer Engine's see wrap_for_training.
            "gradient_accumulation_fusion": self.device.type == "cuda"
            and not fused
            and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        }


def choose_backend(
    backend: Literal["auto", "cpu", "cuda"] = "auto",
    layers: Literal["auto", "local", "transformer_engine"] = "auto",
    head: HeadKind = "auto",
    *,
    tensor: int = 1,
) -> Backend:
    """Resolve the keys ``model.backend``, ``model.layers`` and ``model.head`` on this machine; ``tensor`` is
    ``parallel.tensor``. Raises ``InputError`` if the machine lacks what a key asks for; there is no silent
    fallback."""
    if backend != "cpu":
        # With one queue kernels start in launch order, so that a collective starts before the product that
        # hides it; Megatron's tensor-parallel layers rely on this up to Hopper. Other overlap needs several.
        one_queue = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if tensor > 1 and compute_capability() < 10 else {}
        for name, value in {**CUDA_ENVIRONMENT, **one_queue}.items():
            # A value under the allocator variable's older name applies, too.
            os.environ.setdefault(name, os.environ.get(name.replace("_ALLOC", "_CUDA_ALLOC"), value))
    if backend == "auto":
        backend = "cuda" if torch.cuda.is_available() else "cpu"
    if backend == "cpu":
        return Backend(device=torch.device("cpu"), collectives="gloo", layers="local", head=head)
    if not torch.cuda.is_available():
        raise InputError(
            "model.backend = cuda, but torch sees no GPU here. Run on a GPU node with a CUDA build of torch, "
            "or try a small CPU run: the launch script with --smoke, or `make demo`."
        )
    if layers == "auto":
        layers = "transformer_engine"
    if layers == "transformer_engine" and (problem := engine_problem()) is not None:
        raise InputError(
            f"model.layers = transformer_engine, but {problem}. Install the extra `te`, or set "
            "model.layers = local to debug."
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return Backend(device=device, collectives="nccl", layers=layers, head=head)


def compute_capability() -> int:
    """Return the major compute capability of the first GPU; 0 if unknown. From NVML: CUDA would start, and
    with it read its environment."""
    handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    with suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        nvml.nvmlInit_v2()
        nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))
        nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    return major.value


def check_dtype(backend: Backend, dtype: torch.dtype) -> None:
    """Raise ``InputError`` if the layers cannot train in ``dtype``: in float32, Transformer Engine's
    attention needs memory that grows with the square of the length, and lacks context parallelism."""
    if backend.layers == "transformer_engine" and dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise InputError(
            f"model.dtype = {name}, but model.layers = transformer_engine needs bfloat16: set model.dtype = "
            "bfloat16, or model.layers = local to debug"
        )


def check_head(backend: Backend, dtype: torch.dtype, *sizes: int) -> str | None:
    """Try the log-prob head's Triton kernels, at ``sizes`` (hidden size, a rank's vocabulary) those of the
    run; return a warning if ``model.head`` = auto cannot use them on a GPU, else None. Raises ``InputError``
    if ``model.head`` = triton and they do not work."""
    problem = triton_problem(backend.device, dtype)
    if problem is None and backend.head != "torch":
        problem = tried(backend.device, *sizes)
    if backend.head == "triton" and problem is not None:
        raise InputError(f"model.head = triton, but {problem}: set model.head = auto, or torch")
    if backend.head != "auto" or problem is None or backend.device.type == "cpu":
        return None
    return f"model.head = auto computes log-probs in torch, without the Triton kernels: {problem}"


def peak_tflops(backend: Backend, dtype: torch.dtype) -> float | None:
    """Return the peak TFLOP/s of this rank's GPU in ``dtype``; None if unknown."""
    if backend.device.type != "cuda" or dtype != torch.bfloat16:
        return None
    return find_peak(torch.cuda.get_device_name(backend.device))


def find_peak(name: str) -> float | None:
    """Return the peak bf16 TFLOP/s of the GPU of this name; None if unknown."""
    return next((peak for part, peak in _DENSE_BF16 if part in name), None)


CPU = torch.device("cpu")
_FACTORIES = (
    *("arange", "as_tensor", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros"),
    *("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"),
)


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a tensor factory: ``cuda`` means ``cpu``, and memory is never pinned."""

    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return made


def _to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if args and _is_cuda(args[0]):
        args = (CPU, *args[1:])
    if _is_cuda(kwargs.get("device")):
        kwargs["device"] = CPU
    return _tensor_to(self, *args, **kwargs)


def _type(self: Tensor, *args: Any, **kwargs: Any) -> Any:
    name = _tensor_type(self, *args, **kwargs)
    # Megatron's optimizers sort parameters by type names such as 'torch.cuda.FloatTensor'.
    return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) else name


_tensor_to, _tensor_type = torch.Tensor.to, torch.Tensor.type


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class _Stream:
    """Stand-in for a CUDA stream: the CPU runs everything in order, so waiting does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> _Stream:
        """Return the stream in place of an event."""
        return self

    def synchronize(self) -> None: ...


def _split_sizes_as_numpy(values: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Replace Megatron's ``maybe_move_tensor_to_cpu``, which converts GPU tensors only; collectives do not
    accept a tensor of split sizes."""
    return values.numpy() if as_numpy and isinstance(values, torch.Tensor) else values


@functools.cache
def install_cpu() -> None:
    """Make ``cuda`` mean ``cpu`` for the rest of this process. A second call does nothing."""
    cuda_means_cpu()
    # Adam, gradient norm and router in torch: where Transformer Engine or apex is installed, Megatron would
    # use theirs, which need a GPU.
    megatron_optimizer.Adam, megatron_optimizer.SGD = torch.optim.AdamW, torch.optim.SGD
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = True
    options: Any = torch.optim.AdamW.__init__.__kwdefaults__
    options["fused"] = True  # one pass over memory instead of ten
    for module in (clip_grads, optimizer):
        module.multi_tensor_applier = megatron_utils.local_multi_tensor_applier
        module.multi_tensor_scale_impl = megatron_utils.local_multi_tensor_scale
    clip_grads.l2_norm_impl = megatron_utils.local_multi_tensor_l2_norm
    clip_grads.multi_tensor_scale_tensor_impl = None  # megatron-core 0.19
    vars(moe_utils)["te_general_gemm"] = None  # for the router
    if onednn_is_faster():
        install_products()


def cuda_means_cpu() -> None:
    """Patch devices, streams and random states."""
    _device_constructors()  # caches torch's own factories, for ``with torch.device("meta")``
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.to = _to  # type: ignore[assignment, method-assign]
    torch.Tensor.type = _type  # type: ignore[assignment, method-assign]
    torch.Tensor.cuda = torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.Stream = _Stream  # type: ignore[assignment, misc]
    torch.cuda.current_stream = _Stream  # type: ignore[assignment]
    torch.cuda.default_stream = _Stream  # type: ignore[assignment]
    torch.cuda.stream = lambda *_: nullcontext()  # type: ignore[assignment]
    token_dispatcher.maybe_move_tensor_to_cpu = _split_sizes_as_numpy
    # A tracker that does nothing: our models have no dropout. Recomputed layers still save and restore the
    # GPU's random state, replaced here by an empty tensor.
    megatron_random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.empty(0)
    megatron_random._set_cuda_rng_state = lambda *_, **__: None
