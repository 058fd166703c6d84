"""What is installed, what a run would use, and what is missing for one on GPUs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from typing import Any

_PACKAGES = (
    "torch",
    "megatron-core",
    "transformers",
    "safetensors",
    "transformer-engine",
    "apex",
    "vllm",
    "wandb",
    "sympy",
)


def examine() -> dict[str, Any]:
    """Findings as JSON types: ``python``, ``packages``, ``gpus``, ``use`` and ``missing``."""
    import torch

    from megatron_fspo.mcore.backend import choose_backend, has_transformer_engine

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    versions = {name: _version(name) for name in _PACKAGES}
    engine = has_transformer_engine()
    apex_kernels = [name for name in ("amp_C", "fused_weight_gradient_mlp_cuda") if _importable(name)]
    layers = "auto" if engine or not gpus else "local"
    backend = choose_backend("auto", layers)  # type: ignore[arg-type]
    missing = []
    if not gpus:
        missing.append("a GPU that torch can see (a driver, and a CUDA build of torch)")
    if not engine:
        missing.append(
            "Transformer Engine with its torch extension, on a GPU machine: in a checkout of megatron_fspo "
            "`pip install --no-build-isolation -e '.[te]'`"
        )
    if versions["apex"] and not apex_kernels:
        missing.append(
            "NVIDIA apex: the package `apex` found here has none of its CUDA kernels (the one on the package "
            "index is another project). Remove it, or build NVIDIA's from source"
        )
    elif not apex_kernels:
        missing.append("optional: NVIDIA apex from source, for fused weight-gradient accumulation")
    if not versions["vllm"]:
        missing.append("optional: vllm, in an environment of its own, for rollout.engine = vllm")
    return {
        "python": platform.python_version(),
        "packages": versions,
        "gpus": gpus,
        "use": {
            "device": backend.device.type,
            "collectives": backend.collectives,
            "layers": backend.layers,
            "optimizer": "Transformer Engine" if engine else "apex" if "amp_C" in apex_kernels else "torch",
            "apex kernels": apex_kernels,
        },
        "missing": missing,
    }


def render(findings: dict[str, Any]) -> str:
    """The findings for a person."""
    lines = [f"python {findings['python']}", "", "installed"]
    lines += [f"  {name:<20} {version or '-'}" for name, version in findings["packages"].items()]
    lines += [f"  {'GPUs':<20} {', '.join(findings['gpus']) or '-'}", "", "a run here uses"]
    lines += [
        f"  {name:<20} {', '.join(value) or '-' if isinstance(value, list) else value}"
        for name, value in findings["use"].items()
    ]
    lines += ["", "missing for a run on GPUs"]
    lines += [f"  - {item}" for item in findings["missing"]] or ["  nothing"]
    return "\n".join(lines)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _importable(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
