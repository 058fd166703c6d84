"""gpu_worker.py OUT MEASUREMENT...: takes measurements one after the other; JSON to OUT.

A measurement is a name, or NAME:ARGUMENT. What fails is in the JSON with its traceback, and the next goes on.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from megatron_fspo.mcore.machine.startup import stop
from megatron_fspo.mcore.machine.transformer_engine import cudnn_version, engine_problem, fp8_problems


def machine() -> dict[str, Any]:
    """GPUs, and what they can run."""
    free, total = torch.cuda.mem_get_info()
    problem = engine_problem()
    return {
        "name": torch.cuda.get_device_name(),
        "count": torch.cuda.device_count(),
        "free": free,
        "total": total,
        "engine": problem,
        "fp8": {} if problem else fp8_problems(),
        "versions": {
            "CUDA": torch.version.cuda,
            **({} if problem else {"cuDNN": cudnn_version()}),
            **{name: _version(name) for name in ("torch", "transformer-engine", "megatron-core")},
        },
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def measurements() -> dict[str, Callable[..., dict[str, Any]]]:
    """The measurements by name. Megatron is imported once a process has said what its machine lacks."""
    import gpu_fp8
    import gpu_sending
    import gpu_speed

    return {
        "quantizer": gpu_fp8.quantizer,
        "fp8": gpu_fp8.fp8,
        "step": gpu_speed.step,
        "decoding": gpu_speed.decoding,
        "head": gpu_speed.head,
        "communicators": gpu_speed.communicators,
        "ring": gpu_speed.ring,
        "send": gpu_sending.send,
    }


def take(name: str) -> dict[str, Any]:
    """One measurement, on a machine without the models of the last."""
    kind, *arguments = name.split(":")
    try:
        return machine() if kind == "machine" else measurements()[kind](*arguments)
    except Exception:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise  # the other ranks wait for this one
        return {"failed": traceback.format_exc()}
    finally:
        stop()
        gc.collect()
        torch.cuda.empty_cache()


def main() -> None:
    found = {name: take(name) for name in sys.argv[2:]}
    if os.environ.get("RANK", "0") == "0":
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
