"""The environment of ``make test-te``: Transformer Engine and Megatron find a GPU where there is none.

Our own code runs as on a GPU node. What is faked is around it: torch reports a GPU (``FAKE_GPU`` names
which), ``cuda`` means the CPU, NCCL is gloo, and Transformer Engine's compiled extension is
:mod:`fake_tex`, whose kernels are in plain torch. Its Python is the real one, attention included (its
unfused backend).
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

CAPABILITIES = {"ampere": (8, 0), "ada": (8, 9), "hopper": (9, 0), "blackwell": (10, 0)}
Hook = Callable[[], None]


def register() -> None:
    """Have imports followed by what must be faked; nothing is imported here."""
    before = {"transformer_engine": _prepare_engine, "transformer_engine.pytorch": _hide_triton}
    after = {
        "torch": _fake_cuda,
        "torch.distributed": _gloo_for_nccl,
        "transformer_engine.common": _no_shared_library,
        "transformer_engine.pytorch": _finish_engine,
        "megatron.core.fp8_utils": _recipes_in_torch,
        "megatron_fspo.mcore.machine.backend": _cuda_means_cpu,
    }
    sys.meta_path.insert(0, _Hooks(before, after))
    if os.environ.get("FAKE_TEX") == "none":
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]


class _Hooks(importlib.abc.MetaPathFinder):
    """Calls functions before and after modules are run for the first time."""

    def __init__(self, before: dict[str, Hook], after: dict[str, Hook]) -> None:
        self._before, self._after = before, after
        self._inside: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, with a loader that calls the hooks."""
        if name in self._inside or not (name in self._before or name in self._after):
            return None
        self._inside.add(name)
        try:
            spec = next((s for f in sys.meta_path if (s := f.find_spec(name, path, target))), None)
        finally:
            self._inside.discard(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            self._before.pop(name, _nothing)()
            run(module)
            self._after.pop(name, _nothing)()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _nothing() -> None: ...


def _fake_cuda() -> None:
    """Fake what torch says of GPUs. ``FAKE_GPU=none`` leaves it alone."""
    name = os.environ.get("FAKE_GPU", "hopper")
    if name == "none":
        return
    import torch

    major, minor = CAPABILITIES[name]
    about = SimpleNamespace(
        name=f"a fake {name}", major=major, minor=minor, multi_processor_count=132, total_memory=80 << 30
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 8,
        "get_device_capability": (major, minor),
        "get_device_properties": about,
        "get_device_name": about.name,
        "is_current_stream_capturing": False,
        "set_device": None,
        "manual_seed": None,
        "empty_cache": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "reset_peak_memory_stats": None,
        "max_memory_allocated": 0,
        "memory_allocated": 0,
        "mem_get_info": (80 << 30, 80 << 30),
    }
    for function, answer in answers.items():
        setattr(torch.cuda, function, _always(answer))
    for function in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, function, _always(None))
    torch.version.cuda = "13.0"
    torch.accelerator.is_available = _always(False)  # whose functions are compiled: they would ask the driver
    torch.compile = _as_it_is  # type: ignore[assignment]
    torch.addmm = _with_out_dtype(torch.addmm)
    torch._scaled_mm = _scaled_product
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment]


def _into_out(function: Callable[..., Any]) -> Callable[..., Any]:
    """A product of reference quantisers, which leaves ``out`` alone: fused weight gradients would be lost."""
    names = inspect.signature(function)

    def product(*tensors: Any, **options: Any) -> Any:
        asked = names.bind(*tensors, **options).arguments
        found, *rest = function(*tensors, **options)
        out = asked.get("out")
        if out is None:
            return found, *rest
        return (out.add_(found) if asked.get("accumulate") else out.copy_(found)), *rest

    return product


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


def _with_out_dtype(function: Callable[..., Any]) -> Callable[..., Any]:
    """A product whose sums have another precision than its factors: CUDA has it, the CPU does not."""

    def product(*tensors: Any, out_dtype: Any = None, **options: Any) -> Any:
        wide = tensors if out_dtype is None else [tensor.to(out_dtype) for tensor in tensors]
        return function(*wide, **options)

    return product


def _scaled_product(
    a: Any, b: Any, *, scale_a: Any, scale_b: Any, out_dtype: Any = None, bias: Any = None, **_: Any
) -> Any:
    """Product of FP8 values, added up in fp32: torch's own for the CPU takes many times as long."""
    product = (a.float() @ b.float()) * (scale_a * scale_b)
    return (product if bias is None else product + bias.float()).to(out_dtype or a.dtype)


def _as_it_is(function: Any = None, **_: Any) -> Any:
    """``torch.compile``, whose compiler would look for the GPU."""
    return _as_it_is if function is None else function


def _gloo_for_nccl() -> None:
    import torch.distributed as dist

    start = dist.init_process_group

    def init_process_group(backend: str | None = None, **options: Any) -> None:
        options.pop("device_id", None)
        start("gloo" if backend == "nccl" else backend, **options)

    dist.init_process_group = init_process_group


def _cuda_means_cpu() -> None:
    from megatron_fspo.mcore.machine.backend import cuda_means_cpu

    cuda_means_cpu()


def _recipes_in_torch() -> None:
    """FP8 without kernels."""
    if importlib.util.find_spec("transformer_engine") is None:
        return
    import fake_recipes
    from megatron.core import fp8_utils

    fp8_utils.get_fp8_recipe = fake_recipes.recipe_of


def _prepare_engine() -> None:
    """Transformer Engine itself: its extension is the fake one."""
    import fake_tex

    if os.environ.get("FAKE_TEX") == "meta":  # only the package that has no kernels is installed
        os.environ.pop("NVTE_PROJECT_BUILDING", None)  # from a process with another fake
        return
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # transformer_engine.common loads no shared library
    if os.environ.get("FAKE_TEX") != "missing":
        sys.modules["transformer_engine_torch"] = fake_tex.module()


def _no_shared_library() -> None:
    import transformer_engine.common as common

    def mismatch(framework: str) -> None:
        raise AssertionError("TransformerEngine package version mismatch.")

    if os.environ.get("FAKE_TEX") not in ("meta", "missing"):
        broken = os.environ.get("FAKE_TEX") == "mismatch"
        common.load_framework_extension = mismatch if broken else _always(None)


def _hide_triton() -> None:
    """Kernels in Triton are defined while Transformer Engine is imported, and run on GPUs only."""
    if importlib.util.find_spec("triton") is not None:
        return
    from unittest.mock import MagicMock

    # Torch's compiler looks for Triton when it is loaded: before the stand-in is there.
    for name in ("torch._dynamo", "torch._inductor.utils", "torch._inductor.runtime.triton_compat"):
        importlib.import_module(name)

    class StandIn(ModuleType):
        __path__: tuple[str, ...] = ()
        __version__ = "3.7.0"

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return MagicMock()

    for name in ("", ".language", ".runtime", ".language.core", ".language.standard", ".language.extra"):
        sys.modules[f"triton{name}"] = StandIn(f"triton{name}")


def _finish_engine() -> None:
    """Fake what Transformer Engine asks the hardware for when it runs."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        if type(sys.modules[name]).__name__ == "StandIn":
            del sys.modules[name]
    import torch
    from transformer_engine.pytorch import distributed
    from transformer_engine.pytorch.attention.dot_product_attention import softmax
    from transformer_engine.pytorch.cpp_extensions import gemm

    gemm.custom_gemm = _into_out(gemm.custom_gemm)
    gemm.get_cublas_workspace = lambda device, ub, grouped: (
        [torch.empty(1, dtype=torch.uint8)] if grouped else torch.empty(1, dtype=torch.uint8)
    )
    softmax.FusedScaleMaskSoftmax.is_kernel_available = _always(False)
    # Of recomputed layers.
    distributed._get_cuda_rng_state = _always(torch.empty(0))
    distributed._set_cuda_rng_state = _always(None)
