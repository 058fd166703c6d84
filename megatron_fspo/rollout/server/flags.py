"""Locates vLLM, builds its command line and environment, and validates options before it starts."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_fspo.errors import InputError
from megatron_fspo.rollout.common import COLOCATED_SHARE, KEY_VARIABLE, MODEL, api_key, is_loopback

CPU_HEAD_DIMS: tuple[int, ...] = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that the CPU attention of vLLM 0.32 supports."""
CPU_LATENT_DIMS: tuple[int, ...] = (576,)
"""The same for latent attention, the compressed key and value with the rotated key."""
BACKENDS = {"gloo": "gloo", "disk": "disk", "nccl": "torch_nccl"}
"""Value of ``vllm.transfer`` → name under which our plugin registers it in vLLM."""
EXTENSION = "megatron_fspo.rollout.server.inside.checksums.WorkerExtension"
"""Worker extension that returns checksums of the weights."""
ROUTES_WORKER = "megatron_fspo.rollout.server.inside.cpu_routes.RoutesWorker"
"""Worker class that returns routes on a CPU."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for ``--max-lora-rank``."""
LORA_TARGETS = tuple(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
"""Names in config.json for the number of experts of a layer."""
GUARD = "megatron_fspo.rollout.server.inside.require_key.RequireKey"
"""Middleware that requires the key on every route but health."""

# Run by vLLM's Python to list its packages, without importing vLLM, which takes seconds.
_PROBE = """
from importlib.metadata import distributions, entry_points, version
import json
plugins = [entry.name for entry in entry_points(group="vllm.general_plugins")]
nccl = [package.version for package in distributions() if (package.name or "").startswith("nvidia-nccl-")]
answer = {"version": version("vllm"), "plugin": "megatron_fspo" in plugins, "nccl": nccl[0] if nccl else None}
print(json.dumps(answer))
"""
# Variables of torchrun, whose process group vLLM would try to join, and of our Python and allocator, since
# vLLM's sleep mode needs fixed segments.
_NOT_FOR_VLLM = re.compile(
    r"(GROUP_|ROLE_|LOCAL_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|PYTHON(PATH|HOME)"
    r"|PYTORCH_(CUDA_)?ALLOC_CONF"
)


@dataclass(frozen=True)
class ServerOptions:
    """Options of one server."""

    model: Path
    host: str = "127.0.0.1"
    port: int = 8000
    backend: Literal["gloo", "disk", "nccl"] = "gloo"
    dtype: str = "auto"
    log: Path | None = None
    """Default: ``runs/vllm-PORT.log``."""
    program: str | None = None
    """Path of ``vllm``. Default: ``$VLLM_BIN``, then ``vllm`` on PATH."""
    extra: tuple[str, ...] = ()
    """Further flags of ``vllm serve``."""
    start_seconds: float = 1800.0
    """Time limit for loading and compiling the model."""
    gpus: tuple[str, ...] = ()
    """GPUs that the server sees, with tensor parallelism over several; empty: all."""
    colocated: bool = False
    """Release GPU memory when the trainer asks (``vllm.colocated``)."""
    routes: bool = False
    """Return the experts of each token (``moe.replay = rollout``)."""
    lora_rank: int = 0
    """Largest rank of the policy's adapters; 0: the policy has no adapters."""
    announce: Path | None = None
    """Folder in which to announce the server (:func:`megatron_fspo.rollout.common.announce`)."""
    anyone_may_run_code: bool = False
    """Allow non-loopback addresses without a key: anyone who reaches the port can run code here."""

    @property
    def log_file(self) -> Path:
        return self.log or Path("runs", f"vllm-{self.port}.log")

    @property
    def adapter_folder(self) -> Path:
        """Folder of the adapter that vLLM starts with."""
        return self.log_file.with_suffix(".adapter")

    @property
    def connect_host(self) -> str:
        """The host at which this machine reaches the server."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    @property
    def url(self) -> str:
        host = f"[{self.connect_host}]" if ":" in self.connect_host else self.connect_host
        return f"http://{host}:{self.port}"

    @property
    def public_url(self) -> str:
        """The URL at which other machines reach the server."""
        if self.host in ("0.0.0.0", "::"):
            return f"http://{socket.gethostname()}:{self.port}"
        return self.url

    @property
    def loopback_only(self) -> bool:
        return is_loopback(self.host)


@dataclass(frozen=True)
class Installation:
    program: Path
    version: str
    nccl: str | None = None
    """Version of the package ``nvidia-nccl-*``; None: not installed."""

    @property
    def on_cpu(self) -> bool:
        return "cpu" in self.version


def find_vllm(program: str | None) -> Installation:
    """Locate the program that :class:`ServerOptions` describes, and read its versions. Raises ``InputError``
    if there is none, or its environment lacks our plugin."""
    named = program or os.environ.get("VLLM_BIN") or "vllm"
    path = shutil.which(named)
    if path is None:
        raise InputError(f"vLLM: no program {named}: set --vllm or $VLLM_BIN, or install it with `make vllm`")
    vllm = Path(os.path.abspath(path))
    python = vllm.parent / "python"  # not resolved: a symlink may lead out of the virtual environment
    if not python.exists():
        raise InputError(f"vLLM: there is no python beside {vllm}: set the path in vLLM's environment")
    try:
        probe = subprocess.run(
            [python, "-c", _PROBE],
            capture_output=True,
            text=True,
            env=environment(on_cpu=False),
            timeout=120,
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"vLLM: {python} did not answer within 120 s") from None
    if probe.returncode != 0:
        reason = (probe.stderr.strip() or "no reason given").splitlines()[-1]
        raise InputError(f"vLLM: {python} has no package vllm: {reason}")
    answer = json.loads(probe.stdout)
    if not answer["plugin"]:
        install = f"{python} -m pip install --no-deps -e ."
        raise InputError(f"vLLM: {python} lacks our plugin: run `{install}` in a checkout")
    return Installation(vllm, answer["version"], answer["nccl"])


def check(options: ServerOptions, vllm: Installation) -> None:
    """Raise ``InputError`` for options that would fail minutes later or expose a secret."""
    # Flags that would bypass these checks, in every spelling that vLLM accepts.
    for word in options.extra:
        name = word.split("=")[0].replace("_", "-")
        if not name.startswith("--") or name == "--":
            continue
        if "--api-key".startswith(name):
            raise InputError(f"--api-key: all users can read command lines: set {KEY_VARIABLE} instead")
        if "--host".startswith(name) or "--port".startswith(name):
            raise InputError(f"{name} after --: place it before --, as a flag of serve")
    if api_key() is None and not (options.loopback_only or options.anyone_may_run_code):
        raise InputError(
            f"--host {options.host}: without a key anyone who reaches port {options.port} can run code here: "
            f"set {KEY_VARIABLE} (`openssl rand -hex 32`) here and for the trainer, or --anyone-may-run-code"
        )
    config = model_config(options.model)
    if not 0 <= options.lora_rank <= LORA_RANKS[-1]:
        raise InputError(f"--lora-rank {options.lora_rank}: vLLM supports 1 to {LORA_RANKS[-1]}")
    if options.routes and not any(config.get(key) for key in EXPERT_KEYS):
        raise InputError(f"--routes: {options.model}/config.json has no experts ({', '.join(EXPERT_KEYS)})")
    key, head_dim, legal = "head_dim", _head_dim(config), CPU_HEAD_DIMS
    if config.get("kv_lora_rank"):
        key, head_dim = "kv_lora_rank + qk_rope_head_dim", config["kv_lora_rank"] + config["qk_rope_head_dim"]
        legal = CPU_LATENT_DIMS
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if vllm.on_cpu and rope.get("rope_type", rope.get("type", "default")) == "default":
            # Its kernel for plain RoPE is right for [tokens, heads x size] only (vLLM 0.32).
            problem = "without YaRN vLLM on a CPU rotates the queries of latent attention wrongly"
            raise InputError(f"{options.model}/config.json: {problem}")
    if vllm.on_cpu and head_dim and head_dim not in legal:
        sizes = ", ".join(map(str, legal))
        raise InputError(f"{options.model}/config.json: {key} {head_dim}: vLLM on a CPU supports {sizes}")


def model_config(model: Path) -> dict[str, Any]:
    """Return the checkpoint's config.json. Raises ``InputError`` if it cannot be read."""
    path = model / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise InputError(f"--model {model}: not a Hugging Face checkpoint: cannot read {path}") from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: not a JSON object")
    return content


def _head_dim(config: Mapping[str, Any]) -> int | None:
    """Return the size of a head's values; with latent attention, queries and keys have another one."""
    if config.get("v_head_dim"):
        return int(config["v_head_dim"])
    if not config.get("head_dim") and "hidden_size" in config and config.get("num_attention_heads"):
        return int(config["hidden_size"] // config["num_attention_heads"])
    return config.get("head_dim")


def write_first_adapter(folder: Path, config: Mapping[str, Any]) -> None:
    """Write an adapter without effect (rank 1, one matrix, B = 0) for vLLM to start with. ``config`` is the
    model's config.json; raises ``InputError`` if it lacks the sizes."""
    import torch
    from safetensors.torch import save_file

    hidden, heads, head_dim = config.get("hidden_size"), config.get("num_attention_heads"), _head_dim(config)
    if not (hidden and heads and head_dim):
        raise InputError("--lora-rank: the model's config.json lacks hidden_size or num_attention_heads")
    sizes = {"A": (1, heads * head_dim), "B": (hidden, 1)}
    folder.mkdir(parents=True, exist_ok=True)
    stem = "base_model.model.model.layers.0.self_attn.o_proj.lora"
    factors = {f"{stem}_{name}.weight": torch.zeros(size) for name, size in sizes.items()}
    save_file(factors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    content = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["o_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(content), encoding="utf-8")


def command(options: ServerOptions, vllm: Installation) -> list[str]:
    """Return vLLM's command line. It has no secrets, as every user of the machine can read it."""
    dtype = options.dtype
    if dtype == "auto":  # the checkpoint's dtype; vLLM's "auto" would convert float32 to 16 bits
        config = model_config(options.model)
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "auto")
    words = [str(vllm.program), "serve", str(options.model)]
    words += ["--host", options.host, "--port", str(options.port), "--dtype", dtype]
    words += ["--served-model-name", "base" if options.lora_rank else MODEL, "--enable-scale-out"]
    if options.lora_rank:  # the policy's name is that of the adapter
        rank = next(rank for rank in LORA_RANKS if rank >= options.lora_rank)
        words += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank)]
        words += ["--lora-target-modules", *LORA_TARGETS]
        words += ["--lora-modules", f"{MODEL}={options.adapter_folder.absolute()}"]
    # With a tokenizer vLLM stops at strings (rollout.stop). Without one the trainer cuts the response.
    tokenizers = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((options.model / name).is_file() for name in tokenizers):
        words += ["--skip-tokenizer-init"]
    words += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
    words += ["--weight-transfer-config", json.dumps({"backend": BACKENDS[options.backend]})]
    words += ["--worker-extension-cls", EXTENSION]
    if vllm.on_cpu:
        # Chunked prefill resets a request's random stream, which torch cannot do on a CPU: the engine would
        # die. This concerns prompts, and responses that are read again after a weight update.
        words += ["--enforce-eager", "--no-enable-chunked-prefill"]
    elif options.colocated:  # on a CPU, vLLM has the sleep routes without this flag; they do nothing
        # CUDA and the communicators of the trainer stay on the GPU.
        words += ["--enable-sleep-mode", "--gpu-memory-utilization", str(COLOCATED_SHARE)]
    if options.routes:
        words += ["--enable-return-routed-experts"]
        words += ["--worker-cls", ROUTES_WORKER, "--no-async-scheduling"] if vllm.on_cpu else []
    if len(options.gpus) > 1:
        words += ["--tensor-parallel-size", str(len(options.gpus))]
    words += options.extra
    # Last: vLLM runs the middleware that is named last before all others.
    return words if api_key() is None else [*words, "--middleware", GUARD]


def environment(*, on_cpu: bool, gpus: Sequence[str] = ()) -> dict[str, str]:
    """Return vLLM's environment: this process's, VLLM_API_KEY included, without variables of torchrun, Python
    and the allocator. ``gpus``: the only GPUs that vLLM sees; empty: all."""
    kept = {name: value for name, value in os.environ.items() if not _NOT_FOR_VLLM.fullmatch(name)}
    defaults = {"VLLM_NO_USAGE_STATS": "1"} | ({"VLLM_CPU_KVCACHE_SPACE": "1"} if on_cpu else {})  # GiB
    if gpus:
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    # The Rust front end has no middleware.
    return defaults | kept | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_USE_RUST_FRONTEND": "0"}
