"""Device, collectives and layers of this machine: the one file where CPU and CUDA part ways.

| | CPU | CUDA |
|---|---|---|
| collectives | gloo | NCCL |
| layers | Megatron's local layers, our norm and attention | Transformer Engine (or local) |
| fusions | off | on where the layers offer them |

Megatron writes ``device="cuda"`` in a few dozen places. On a machine without a GPU they mean the CPU: torch's
factories and four methods of its tensors are told so, and a few CUDA calls get their CPU meaning. (A torch
function mode would say it in one place, but stand in the way of every call.) No class of Megatron is touched;
norms and attention come through the layer spec (:mod:`megatron_fspo.mcore.layers`).
"""

from __future__ import annotations

import functools
import importlib.util
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core import utils as megatron_utils
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.optimizer import clip_grads, optimizer
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils._device import _device_constructors

from megatron_fspo.errors import InputError
from megatron_fspo.mcore.cpu_products import install_products, onednn_is_faster
from megatron_fspo.mcore.engine import engine_problem
from megatron_fspo.mcore.layers import local_block_spec
from megatron_fspo.parallel.head import HeadKind, tried, triton_problem

CUDA_ENVIRONMENT = {
    # Kernels begin in the order in which they were asked for: a collective before the matrix product that is
    # to hide it. Megatron's overlap in tensor and context parallel layers counts on that.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # Packs differ in length: pieces of memory that fitted one step's would be in the way of the next one's.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
"""Variables that CUDA and torch's allocator read when they start, unless the user has set them."""
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
    head: HeadKind = "auto"

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the start of a run."""
        if self.device.type == "cpu" or self.layers == "transformer_engine":
            return ()
        return (
            "model.layers = local is to debug with: on a GPU each layer waits for it 7 times in each pass",
        )

    def install(self) -> None:
        """Prepare this process. Before any model is built."""
        if self.device.type == "cpu":
            install_cpu()
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

    def peak_memory(self) -> int:
        """Bytes of tensors on the GPU at most since the last call; 0 on a CPU."""
        if self.device.type == "cpu":
            return 0
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

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
            from megatron_fspo.mcore.te_attention import SharingAttention

            layer = get_gpt_layer_with_transformer_engine_spec(
                num_experts=config.num_moe_experts,
                moe_grouped_gemm=config.moe_grouped_gemm,
                qk_layernorm=config.qk_layernorm,
            )
            layer.submodules.self_attention.submodules.core_attention = SharingAttention
            return layer
        return local_block_spec(config, vp_stage)


def choose_backend(
    backend: Literal["auto", "cpu", "cuda"] = "auto",
    layers: Literal["auto", "local", "transformer_engine"] = "auto",
    head: HeadKind = "auto",
) -> Backend:
    """Resolve the keys ``model.backend``, ``model.layers`` and ``model.head`` on this machine.

    Raises:
        InputError: what was asked for is not here. Nothing falls back silently.
    """
    if backend != "cpu":
        for name, value in CUDA_ENVIRONMENT.items():
            # The allocator's variable goes before the older one of that name.
            os.environ.setdefault(name, os.environ.get(name.replace("_ALLOC", "_CUDA_ALLOC"), value))
    if backend == "auto":
        backend = "cuda" if torch.cuda.is_available() else "cpu"
    if backend == "cpu":
        return Backend(device=torch.device("cpu"), collectives="gloo", layers="local", head=head)
    if not torch.cuda.is_available():
        raise InputError(
            "model.backend = cuda, but torch sees no GPU here. Run on a GPU node with a CUDA build of torch, "
            "or try the small CPU run: --smoke with the launch script, or `make demo`."
        )
    if layers == "auto":
        layers = "transformer_engine"
    if layers == "transformer_engine" and (problem := engine_problem()) is not None:
        raise InputError(
            f"model.layers = transformer_engine, but {problem}. Install the extra `te`, or to debug set "
            "model.layers = local."
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return Backend(device=device, collectives="nccl", layers=layers, head=head)


def check_dtype(backend: Backend, dtype: torch.dtype) -> None:
    """Raise ``InputError`` where the layers cannot train in ``dtype``.

    In float32 Transformer Engine has no fast attention: memory grows with the square of the length, and
    there is none with context parallel.
    """
    if backend.layers == "transformer_engine" and dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise InputError(
            f"model.dtype = {name}, but model.layers = transformer_engine needs bfloat16: set model.dtype = "
            "bfloat16, or to debug model.layers = local"
        )


def check_head(backend: Backend, dtype: torch.dtype) -> str | None:
    """Return what to say where ``model.head`` = auto leaves a GPU without the kernels; None otherwise.

    The kernels are tried on a small problem.

    Raises:
        InputError: they were asked for and do not run here.
    """
    problem = triton_problem(backend.device, dtype)
    if problem is None and backend.head != "torch":
        problem = tried(backend.device)
    if backend.head == "triton" and problem is not None:
        raise InputError(f"model.head = triton, but {problem}: set model.head = auto, or torch")
    if backend.head != "auto" or problem is None or backend.device.type == "cpu":
        return None
    return f"model.head = auto: log-probs by chunks in torch, as for the kernels in Triton {problem}"


def peak_tflops(backend: Backend, dtype: torch.dtype) -> float | None:
    """Most TFLOP/s of one rank's GPU; None where that is not known, as on a CPU."""
    if backend.device.type != "cuda" or dtype != torch.bfloat16:
        return None
    return peak_of(torch.cuda.get_device_name(backend.device))


def peak_of(name: str) -> float | None:
    """TFLOP/s in bf16 of a GPU of this name."""
    return next((peak for part, peak in _DENSE_BF16 if part in name), None)


CPU = torch.device("cpu")
_FACTORIES = (
    *("arange", "as_tensor", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros"),
    *("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"),
)


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A factory of tensors for which ``cuda`` is ``cpu``, and whose memory is never pinned."""

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
    # Megatron's optimizers sort parameters by the name 'torch.cuda.FloatTensor'.
    return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) else name


_tensor_to, _tensor_type = torch.Tensor.to, torch.Tensor.type


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class _Stream:
    """The CPU runs everything in order: waiting is over as soon as it begins."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> _Stream:
        """An event to synchronise with: the stream will do."""
        return self

    def synchronize(self) -> None: ...


def _split_sizes_as_numpy(values: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Brings what the dispatcher of experts counted to the CPU, for the collective.

    Megatron's own does so for tensors of a GPU only, and no collective takes its split sizes as a tensor.
    """
    return values.numpy() if as_numpy and isinstance(values, torch.Tensor) else values


@functools.cache
def install_cpu() -> None:
    """Make ``cuda`` mean ``cpu`` for the rest of this process. Calling it again does nothing."""
    cuda_means_cpu()
    # Adam, the gradient's norm and the router in torch: wherever Transformer Engine or apex is installed,
    # Megatron takes theirs, which are for GPUs only.
    megatron_optimizer.Adam, megatron_optimizer.SGD = torch.optim.AdamW, torch.optim.SGD
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = True
    options: Any = torch.optim.AdamW.__init__.__kwdefaults__
    options["fused"] = True  # one pass over the numbers in place of ten
    for module in (clip_grads, optimizer):
        module.multi_tensor_applier = megatron_utils.local_multi_tensor_applier
        module.multi_tensor_scale_impl = megatron_utils.local_multi_tensor_scale
    clip_grads.l2_norm_impl = megatron_utils.local_multi_tensor_l2_norm
    clip_grads.multi_tensor_scale_tensor_impl = None  # of 0.19
    vars(moe_utils)["te_general_gemm"] = None  # the router's
    if onednn_is_faster():
        install_products()


def cuda_means_cpu() -> None:
    """The devices, streams and random states."""
    _device_constructors()  # remembers torch's own factories, for ``with torch.device("meta")``
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
    # The tracker that does nothing: our models have no dropout, so no state of its own is needed. Recomputed
    # layers still save and restore what they take for the state of a GPU.
    megatron_random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.empty(0)
    megatron_random._set_cuda_rng_state = lambda *_, **__: None
