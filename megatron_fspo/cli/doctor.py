"""Reports what is installed, what a run would use, and what is missing for a run on GPUs."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from megatron_fspo.errors import InputError

if TYPE_CHECKING:
    from megatron_fspo.config import Config

_PACKAGES = (
    "torch megatron-core transformers safetensors transformer-engine apex vllm wandb tensorboard sympy"
).split()
_ANY_RUN = (
    "torch einops psutil numpy pydantic safetensors transformers tqdm anyio httpx msgspec pyarrow".split()
)
_MODULES = {
    "": {name: name for name in _ANY_RUN}
    | {"megatron-core": "megatron", "tomli-w": "tomli_w", "huggingface-hub": "huggingface_hub"},
    "lab": {"jinja2": "jinja2", "markupsafe": "markupsafe", "vl-convert-python": "vl_convert"},
    "math": {"math-verify": "math_verify", "sympy": "sympy"},
    "gym": {"reasoning-gym": "reasoning_gym"},
}
"""Extra ("" for required packages) → package → module: the dependencies in pyproject.toml."""


_PORTS = {
    "store and gloo": "--nproc: 127.0.0.1; launch script: MASTER_ADDR; torchrun: all (no password)",
    "NCCL": "NCCL_SOCKET_IFNAME, or its own choice",
    "vLLM servers": "127.0.0.1, or --host with VLLM_API_KEY",
}


def missing_package(module: str | None) -> str | None:
    """Return the error message, one line, for a missing module of a dependency of ours, required or of an
    extra; None for any other module."""
    top = (module or "").partition(".")[0]
    found = [(x, name) for x, modules in _MODULES.items() for name, own in modules.items() if own == top]
    if not found:
        return None
    extra, name = found[0]
    if extra:
        return (
            f"this needs the Python package {name} of the extra {extra}: `pip install -e '.[{extra}]'` in a "
            "checkout of megatron_fspo installs it"
        )
    others = len(absent()) - 1
    more = f" (and {others} more)" if others > 0 else ""
    return (
        f"this needs the Python package {name}{more}, which is not installed: run `pip install -e .` in a "
        "checkout of megatron_fspo; `megatron-fspo doctor` lists missing packages"
    )


def absent(extra: str = "") -> list[str]:
    """Return the packages of an extra, or required ones, that are not installed."""
    return [name for name, module in _MODULES[extra].items() if not _importable(module)]


def installed() -> dict[str, Any]:
    """Return the findings of :func:`examine` that need no torch."""
    required = absent()
    later = "install the packages above, then run" if required else "not looked for: without --quick, run"
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "gpus": [],
        "use": {},
        "transformer engine": {},
        "ports": _PORTS,
        "missing": [f"{later} `megatron-fspo doctor` again"],
        "required": required,
    }


def examine(config: Config | None = None) -> dict[str, Any]:
    """Examine the installation and return the findings as JSON types.

    Keys: ``python``, ``packages``, ``gpus``, ``use``, ``ports`` (who listens where), ``missing``,
    ``required`` (required packages that are missing) and ``transformer engine``. The last has the attention
    backend for the shapes of the run, by default those of Qwen3-8B; it is empty without a GPU or if the
    package does not import. Without torch, megatron-core or pydantic, ``gpus`` and ``use`` are empty. Raises
    ``InputError`` if the run's model cannot be read.
    """
    findings = installed()
    if {"torch", "megatron-core", "pydantic"} & set(findings["required"]):
        return findings
    import torch

    from megatron_fspo.cli.node import node_problems
    from megatron_fspo.mcore.machine.backend import choose_backend
    from megatron_fspo.mcore.machine.transformer_engine import engine_problem
    from megatron_fspo.mcore.model.gated_delta import kernels

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    problem = engine_problem()
    apex_kernels = [name for name in ("amp_C", "fused_weight_gradient_mlp_cuda") if _importable(name)]
    backend = choose_backend("auto", "auto" if problem is None or not gpus else "local")
    missing = [*node_problems(len(gpus), torch.version.cuda)]
    if not gpus:
        missing.append("a GPU that torch can use: needs a driver and a CUDA build of torch")
    if problem is not None:
        missing.append(
            f"Transformer Engine: {problem}. On a GPU machine with torch, run in a checkout of megatron_fspo "
            "`pip install wheel packaging ninja && pip install --no-build-isolation -e '.[te]'`; this needs "
            "CUDA's nvcc and the headers of cuDNN and NCCL"
        )
    if findings["packages"]["apex"] and not apex_kernels:
        missing.append(
            "NVIDIA apex: the installed package `apex` has no CUDA kernels (on PyPI that name is another "
            "project). Uninstall it; Transformer Engine has all that a run needs"
        )
    for extra in filter(None, _MODULES):
        if names := absent(extra):
            missing.append(f"optional: {', '.join(names)}: `pip install -e '.[{extra}]'`")
    if not kernels():
        missing.append("optional: flash-linear-attention, for Qwen3.5: `pip install flash-linear-attention`")
    if not findings["packages"]["vllm"]:
        missing.append("optional: vllm, in a separate environment, for rollout.engine = vllm")
    if torch.distributed.is_nccl_available():
        missing += nccl_problems(".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    # The library whose Adam a run on GPUs uses.
    library = "Transformer Engine" if problem is None else "apex" if "amp_C" in apex_kernels else "torch"
    use = {
        "device": backend.device.type,
        "collectives": backend.collectives,
        "layers": backend.layers,
        "optimizer": "torch" if not gpus else library,
        "apex kernels": apex_kernels,
        "linear attention": kernels() or "torch",
    }
    engine = _engine(config) if problem is None and gpus else {}
    return findings | {"gpus": gpus, "use": use, "transformer engine": engine, "missing": missing}


def _engine(config: Config | None) -> dict[str, str]:
    """Return Transformer Engine's version and what it supports on this GPU."""
    from megatron_fspo.mcore.machine import transformer_engine as engine

    facts = {
        "version": engine.engine_version(),
        "torch extension": _version("transformer-engine-torch") or "built by hand",
        "cuDNN": engine.cudnn_version(),
    }
    for recipe, problem in engine.fp8_problems().items():
        facts[f"FP8 {recipe}"] = "runs" if problem is None else f"no: {problem}"
    # Attention shapes on one rank of the run; by default those of Qwen3-8B.
    name, shapes = "Qwen3-8B", {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "max_tokens": 16384}
    if config is not None:
        from megatron_fspo.data.hub import find_checkpoint
        from megatron_fspo.weights import read_architecture

        folder = find_checkpoint(config.model.checkpoint, weights=False)
        arch, tensor = read_architecture(folder), config.parallel.tensor
        name = "the run"
        shapes = {
            "num_heads": arch.num_heads // tensor,
            "num_kv_heads": max(arch.num_kv_heads // tensor, 1),
            "head_dim": arch.head_dim,
            "max_tokens": config.data.max_prompt_tokens + config.rollout.max_response_tokens,
            "context": config.parallel.context,
        }
    return {**facts, f"attention of {name}": engine.attention_backend(**shapes)}


def nccl_problems(version: str) -> list[str]:
    """Return why a trainer with this NCCL and the local vLLM cannot share a process group."""
    from megatron_fspo.rollout.server.flags import find_vllm

    with suppress(InputError):  # no vLLM here
        vllm = find_vllm(None)
        if vllm.nccl not in (None, version):
            differ = f"{version} here, {vllm.nccl} with {vllm.program}"
            return [f"optional: vllm.transfer = nccl needs the same NCCL in both environments: {differ}"]
    return []


def render(findings: dict[str, Any]) -> str:
    """Return the findings as text."""

    def block(title: str, rows: dict[str, Any]) -> list[str]:
        texts = {name: ", ".join(value) if isinstance(value, list) else value for name, value in rows.items()}
        return ["", title, *(f"  {name:<20} {text or '-'}" for name, text in texts.items())] if rows else []

    def listed(title: str, items: list[str]) -> list[str]:
        return ["", title, *(f"  - {item}" for item in items)] if items else []

    lines = [
        f"python {findings['python']}",
        *block("installed", findings["packages"] | {"GPUs": findings["gpus"]}),
        *listed(
            "missing for any run: run `pip install -e .` in a checkout of megatron_fspo", findings["required"]
        ),
        *block("a run here uses", findings["use"]),
        *block("where a job listens", findings["ports"]),
        *block("Transformer Engine here", findings["transformer engine"]),
        *listed("missing for a run on GPUs", findings["missing"] or ["nothing"]),
    ]
    return "\n".join(lines)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _importable(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def verl_problem() -> str | None:
    """Import verl and return why it has no policy loss ``fspo``; None if it has. verl
    logs a plugin that fails to load at DEBUG level only, and later reports an unsupported loss mode."""
    if importlib.util.find_spec("verl") is None:
        return "verl is not installed in this environment"
    registry = importlib.import_module("verl.trainer.ppo.core_algos").POLICY_LOSS_REGISTRY
    if "fspo" in registry:
        return None
    allowed = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    entry_points = importlib.metadata.entry_points(group="verl.plugins", name="megatron_fspo")
    if not entry_points:
        return "megatron_fspo is installed without its entry point; run `pip install --no-deps -e .`"
    if allowed != "auto" and "megatron_fspo" not in allowed.split(","):
        return f"VERL_USE_EXTERNAL_PLUGINS={allowed} excludes megatron_fspo"
    try:
        next(iter(entry_points)).load()
    except Exception as error:
        return f"megatron_fspo fails to load: {error!r}"
    return "megatron_fspo loads now, but was not loaded when verl was imported"
