"""Convert a full-size checkpoint to Megatron and back, beside copying its files: time, memory, and every bit.

    python benchmarks/convert.py --folder /scratch

Makes a Qwen3-8B with random bf16 weights (16.4 GB) in --folder, unless it is there, then copies it, converts
it to a Megatron distributed checkpoint and that back, and compares original and result tensor by tensor;
--folder needs room for three of them. Every step is a process of its own that starts with its input out of
the page cache; time is until all is on the disk. Peak is the largest resident set of the process.
"""

from __future__ import annotations

import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from machine import ROOT, environment, machine, markdown, options_of, peak_kib
from megatron_fspo.weights import expected_hf_shapes, read_architecture, row_blocks, write_hf_checkpoint

COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}
# Sizes from the config.json files of Qwen/Qwen3-8B and Qwen/Qwen3-0.6B.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
}


def make(folder: Path, model: str) -> None:
    """A checkpoint with random weights, block by block."""
    with tempfile.TemporaryDirectory() as config_only:
        config = Path(config_only) / "config.json"
        config.write_text(json.dumps(COMMON | MODELS[model]), encoding="utf-8")
        arch = read_architecture(config_only)
        generator = torch.Generator().manual_seed(0)

        def blocks() -> Iterator[tuple[str, Tensor]]:
            for name, shape in expected_hf_shapes(arch).items():
                for rows in row_blocks(shape, arch.dtype.itemsize):
                    size = (rows.stop - rows.start, *shape[1:])
                    yield name, torch.randn(size, generator=generator).to(arch.dtype)

        write_hf_checkpoint(folder, blocks(), config_only, dtype=arch.dtype)


def forget(folder: Path) -> None:
    """Write what is not yet on the disk and drop the folder from the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def step(source: Path, *words: str | Path) -> dict[str, float]:
    """Seconds and peak MiB of a command that reads ``source``."""
    forget(source)
    began = time.perf_counter()
    arguments = [sys.executable, str(Path(__file__).resolve()), "--in-this-process", *map(str, words)]
    done = subprocess.run(arguments, env=environment(), capture_output=True, text=True)
    os.sync()
    seconds = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}{shlex.join(arguments)} failed, exit status {done.returncode}")
    return {"seconds": seconds, "peak_mib": int(done.stdout.splitlines()[-1]) / 1024}


def serve(words: list[str]) -> None:
    """Run a tool, or copy, in this process; the last line on stdout is its peak in KiB."""
    program, *arguments = words
    if program == "copy":
        shutil.copytree(*arguments)
    else:
        sys.argv = [program, *arguments]
        try:
            runpy.run_path(str(ROOT / "tools" / program), run_name="__main__")
        except SystemExit as exit:
            if exit.code:
                raise
    print(peak_kib())


def measure(folder: Path, model: str) -> dict[str, Any]:
    source, copy, megatron, back = (folder / f"{model}-{what}" for what in ("hf", "copy", "megatron", "back"))
    for made in (copy, megatron, back):
        shutil.rmtree(made, ignore_errors=True)
    if not source.exists():
        make(source, model)
    size = sum(path.stat().st_size for path in source.rglob("*.safetensors"))
    copied = step(source, "copy", source, copy)
    shutil.rmtree(copy)
    to_megatron = step(source, "convert_hf_to_megatron.py", source, megatron)
    to_hf = step(megatron, "convert_megatron_to_hf.py", megatron, back)
    compared = step(back, "verify_checkpoint.py", source, back)  # its exit status: the same bit for bit
    for made in (megatron, back):
        shutil.rmtree(made)
    steps = {"copy": copied, "to Megatron": to_megatron, "to Hugging Face": to_hf, "compare": compared}
    rows = {
        name: {"time": round(one["seconds"] / copied["seconds"], 2), "peak_mib": round(one["peak_mib"])}
        for name, one in steps.items()
    }
    return {"model": model, "bytes": size, "steps": rows}


def table(report: dict[str, Any]) -> str:
    """Markdown."""
    head = [f"{report['model']}, {report['bytes'] / 1e9:.1f} GB", "time", "peak memory"]
    steps = report["steps"].items()
    return markdown(head, [[n, f"{x['time']:.2f}", f"{x['peak_mib'] / 1024:.2f} GiB"] for n, x in steps])


def main() -> None:
    if sys.argv[1:2] == ["--in-this-process"]:
        serve(sys.argv[2:])
        return
    parser = options_of(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="with room for three checkpoints")
    parser.add_argument("--model", choices=[*MODELS], default="qwen3-8b", help="(default qwen3-8b)")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/convert.json")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    report = measure(args.folder, args.model)
    command = f"python benchmarks/convert.py --folder FOLDER --model {args.model}"
    report |= {"command": command, "machine": machine()}
    args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(report))


if __name__ == "__main__":
    main()
