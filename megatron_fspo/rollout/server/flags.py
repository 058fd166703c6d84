"""vLLM's program, flags and environment for this trainer, and what is refused before it starts."""

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
from megatron_fspo.rollout.common import KEY_VARIABLE, MODEL, api_key, is_loopback

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of a head that the CPU attention of vLLM 0.32 can do."""
BACKENDS = {"gloo": "gloo", "disk": "disk", "nccl": "torch_nccl"}
"""Our word for a way of weights → the name under which the plugin registers it in vLLM."""
EXTENSION = "megatron_fspo.rollout.server.inside.checksums.WorkerExtension"
"""Lets the trainer ask for checksums of the weights."""
ROUTES_WORKER = "megatron_fspo.rollout.server.inside.cpu_routes.RoutesWorker"
"""Returns routes on a CPU."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as ``--max-lora-rank``."""
LORA_TARGETS = tuple(f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down"))
GUARD = "megatron_fspo.rollout.server.inside.require_key.RequireKey"
"""Asks for the key on every route of the server but health."""

# Asks vLLM's own Python what is in its environment, without importing vLLM, which takes seconds.
_PROBE = """
from importlib.metadata import distributions, entry_points, version
import json
plugins = [entry.name for entry in entry_points(group="vllm.general_plugins")]
nccl = [package.version for package in distributions() if (package.name or "").startswith("nvidia-nccl-")]
answer = {"version": version("vllm"), "plugin": "megatron_fspo" in plugins, "nccl": nccl[0] if nccl else None}
print(json.dumps(answer))
"""
# Variables of torchrun, and of the trainer's Python and memory. With the agent's store named in its
# environment, vLLM would try to join the trainer's process group; memory that sleeps is in fixed segments.
_NOT_FOR_VLLM = re.compile(
    r"(GROUP_|ROLE_|LOCAL_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|PYTHON(PATH|HOME)"
    r"|PYTORCH_(CUDA_)?ALLOC_CONF"
)


@dataclass(frozen=True)
class ServerOptions:
    """One server: what it serves, where, and how it takes new weights."""

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
    """More flags of ``vllm serve``."""
    start_seconds: float = 1800.0
    """Time to load and compile a large model."""
    gpus: tuple[str, ...] = ()
    """The only ones that it sees; of several each has a shard of the model (tensor parallel)."""
    colocated: bool = False
    """Give up the GPUs' memory when the trainer on them asks (``vllm.colocated``)."""
    routes: bool = False
    """Return the experts of every token (``moe.replay = rollout``)."""
    lora_rank: int = 0
    """Largest rank of the adapters that the policy consists of besides the model; 0: it has none."""
    announce: Path | None = None
    """Folder in which the trainer finds the server (:func:`megatron_fspo.rollout.common.announce`)."""
    anyone_may_run_code: bool = False
    """Listen beyond this machine without a key: whoever reaches the port runs code here."""

    @property
    def log_file(self) -> Path:
        return self.log or Path("runs", f"vllm-{self.port}.log")

    @property
    def adapter_folder(self) -> Path:
        """Of the adapter that vLLM starts with."""
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
    """A vLLM."""

    program: Path
    version: str
    nccl: str | None = None
    """Version; None: its torch has not come with the package of it."""

    @property
    def on_cpu(self) -> bool:
        return "cpu" in self.version


def find_vllm(program: str | None) -> Installation:
    """The program, named as in :class:`ServerOptions`, and its versions.

    Raises:
        InputError: it is not there, or its environment lacks our plugin.
    """
    named = program or os.environ.get("VLLM_BIN") or "vllm"
    path = shutil.which(named)
    if path is None:
        raise InputError(f"vLLM: no program {named}; name one with --vllm or $VLLM_BIN, or `make vllm`")
    vllm = Path(os.path.abspath(path))
    python = vllm.parent / "python"  # not resolved: a link out of a virtual environment would leave it
    if not python.exists():
        raise InputError(f"vLLM: {vllm} has no python beside it; name the program in vLLM's environment")
    probe = subprocess.run(
        [python, "-c", _PROBE], capture_output=True, text=True, env=environment(on_cpu=False)
    )
    if probe.returncode != 0:
        reason = (probe.stderr.strip() or "no reason given").splitlines()[-1]
        raise InputError(f"vLLM: {python} knows of no package vllm: {reason}")
    answer = json.loads(probe.stdout)
    if not answer["plugin"]:
        install = f"{python} -m pip install --no-deps -e ."
        raise InputError(f"vLLM: {python} lacks our plugin; in a checkout run `{install}`")
    return Installation(vllm, answer["version"], answer["nccl"])


def check(options: ServerOptions, vllm: Installation) -> None:
    """Refuse what would fail minutes later, or would show a secret.

    Raises:
        InputError
    """
    # Flags that go round what is checked here, in every way in which vLLM takes them.
    for word in options.extra:
        name = word.split("=")[0].replace("_", "-")
        if not name.startswith("--") or name == "--":
            continue
        if "--api-key".startswith(name):
            raise InputError(f"--api-key: every user can read it there; set {KEY_VARIABLE} instead")
        if "--host".startswith(name) or "--port".startswith(name):
            raise InputError(f"{name} after --: it is a flag of serve, which has to know; name it before")
    if api_key() is None and not (options.loopback_only or options.anyone_may_run_code):
        raise InputError(
            f"--host {options.host}: without a key whoever reaches port {options.port} runs code here; "
            f"set {KEY_VARIABLE} (`openssl rand -hex 32`) here and for the trainer, or --anyone-may-run-code"
        )
    config = model_config(options.model)
    head_dim = _head_dim(config)
    if not 0 <= options.lora_rank <= LORA_RANKS[-1]:
        raise InputError(f"--lora-rank {options.lora_rank}: vLLM takes 1 to {LORA_RANKS[-1]}")
    if options.routes and not config.get("num_experts"):
        raise InputError(f"--routes: {options.model}/config.json names no experts (num_experts)")
    if vllm.on_cpu and head_dim and head_dim not in CPU_HEAD_DIMS:
        sizes = ", ".join(map(str, CPU_HEAD_DIMS))
        raise InputError(f"{options.model}/config.json: head_dim {head_dim}: vLLM on a CPU can do {sizes}")


def model_config(model: Path) -> dict[str, Any]:
    """The checkpoint's config.json; ``InputError`` where there is none."""
    path = model / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise InputError(f"--model {model}: no Hugging Face checkpoint, {path} cannot be read") from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: not a JSON object")
    return content


def _head_dim(config: Mapping[str, Any]) -> int | None:
    if not config.get("head_dim") and "hidden_size" in config and config.get("num_attention_heads"):
        return int(config["hidden_size"] // config["num_attention_heads"])
    return config.get("head_dim")


def write_first_adapter(folder: Path, config: Mapping[str, Any]) -> None:
    """Write an adapter that changes nothing, for vLLM to start with: rank 1, of one matrix, B = 0.

    Raises:
        InputError: the ``config`` of the model names no sizes.
    """
    import torch
    from safetensors.torch import save_file

    try:
        outputs = config["num_attention_heads"] * (_head_dim(config) or 0)
        sizes = {"A": (1, config["hidden_size"]), "B": (outputs, 1)}
    except (KeyError, TypeError) as error:
        raise InputError(f"--lora-rank: config.json of the model has no {error}") from None
    folder.mkdir(parents=True, exist_ok=True)
    stem = "base_model.model.model.layers.0.self_attn.q_proj.lora"
    factors = {f"{stem}_{name}.weight": torch.zeros(size) for name, size in sizes.items()}
    save_file(factors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    content = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(content), encoding="utf-8")


def command(options: ServerOptions, vllm: Installation) -> list[str]:
    """vLLM's command line. Nothing secret: every user of the machine can read it."""
    dtype = options.dtype
    if dtype == "auto":  # the checkpoint's own: vLLM's "auto" halves float32
        config = model_config(options.model)
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "auto")
    words = [str(vllm.program), "serve", str(options.model)]
    words += ["--host", options.host, "--port", str(options.port), "--dtype", dtype]
    words += ["--served-model-name", "base" if options.lora_rank else MODEL, "--enable-scale-out"]
    if options.lora_rank:  # whoever asks for the policy gets the adapter
        rank = next(rank for rank in LORA_RANKS if rank >= options.lora_rank)
        words += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank)]
        words += ["--lora-target-modules", *LORA_TARGETS]
        words += ["--lora-modules", f"{MODEL}={options.adapter_folder.absolute()}"]
    # With a tokenizer it can stop at strings (rollout.stop); else it goes on, and the trainer cuts off.
    tokenizers = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((options.model / name).is_file() for name in tokenizers):
        words += ["--skip-tokenizer-init"]
    words += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
    words += ["--weight-transfer-config", json.dumps({"backend": BACKENDS[options.backend]})]
    words += ["--worker-extension-cls", EXTENSION]
    if vllm.on_cpu:
        # A prompt that is read in parts has its random stream set back, which torch cannot do on a CPU: the
        # engine would die, also of responses that are read again because an update met them.
        words += ["--enforce-eager", "--no-enable-chunked-prefill"]
    elif options.colocated:  # on a CPU the routes are there without it, and move nothing
        words += ["--enable-sleep-mode"]
    if options.routes:
        words += ["--enable-return-routed-experts"]
        words += ["--worker-cls", ROUTES_WORKER, "--no-async-scheduling"] if vllm.on_cpu else []
    if len(options.gpus) > 1:
        words += ["--tensor-parallel-size", str(len(options.gpus))]
    words += options.extra
    # Last: vLLM puts the middleware that it is told of last before all others.
    return words if api_key() is None else [*words, "--middleware", GUARD]


def environment(*, on_cpu: bool, gpus: Sequence[str] = ()) -> dict[str, str]:
    """vLLM's environment: ours, VLLM_API_KEY included, without those of torchrun, our Python and allocator.
    The server sees ``gpus`` only, by default all."""
    kept = {name: value for name, value in os.environ.items() if not _NOT_FOR_VLLM.fullmatch(name)}
    defaults = {"VLLM_NO_USAGE_STATS": "1"} | ({"VLLM_CPU_KVCACHE_SPACE": "1"} if on_cpu else {})  # GiB
    if gpus:
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    # Its other front end has no middleware.
    return defaults | kept | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_USE_RUST_FRONTEND": "0"}
