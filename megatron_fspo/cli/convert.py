"""The commands convert hf-to-megatron and convert megatron-to-hf."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from megatron_fspo.cli.command import JSON, argument, command
from megatron_fspo.cli.console import progress_bar
from megatron_fspo.errors import InputError

_UNITS = {"": 1, "M": 10**6, "G": 10**9, "Mi": 2**20, "Gi": 2**30}
_OUT = argument("out", "output folder; replaces a checkpoint in it", Path)


@command(
    argument("source", "folder with config.json and safetensors files", Path),
    _OUT,
    JSON,
)
def hf_to_megatron(args: argparse.Namespace, _: list[str]) -> int:
    """Convert a Hugging Face checkpoint to a Megatron one, which any parallel layout can load.

        megatron-fspo convert hf-to-megatron Qwen3-8B Qwen3-8B-megatron

    Reads Llama 3, Qwen2, Qwen3, Qwen3-MoE and Mixtral, in bf16, fp16, fp32 or blockwise FP8 (converted to
    bf16). Writes config, tokenizer, manifest.json and the weights (torch_dist/). Memory does not grow with
    the model. Exit status 2: invalid input; nothing is written.
    """
    from megatron_fspo import weights

    arch, reader = weights.read_architecture(args.source), weights.HFReader(args.source)
    size = weights.size_in_bytes(reader)
    with progress_bar(size, "converting") as progress:
        manifest = weights.write_megatron_checkpoint(args.out, reader, arch, progress=progress)
    count = len(manifest.tensors)
    report = {"out": str(args.out), "tensors": count, "bytes": size}
    print(json.dumps(report) if args.json else f"{args.out}: {count} tensors, {size:,} bytes")
    return 0


@command(
    argument("source", "folder with .metadata or torch_dist/", Path),
    _OUT,
    JSON,
    argument("--hf DIR", "checkpoint with config, tokenizer and dtypes", Path),
    argument("--max-shard-size SIZE", "maximum size of a file", default="5GB"),
    argument("--dtype", "dtype to write (default: unchanged)", choices=["float32", "bfloat16", "float16"]),
)
def megatron_to_hf(args: argparse.Namespace, _: list[str]) -> int:
    """Convert a Megatron checkpoint, saved under any parallel layout, to a Hugging Face checkpoint.

        megatron-fspo convert megatron-to-hf Qwen3-8B-megatron Qwen3-8B-again
        megatron-fspo convert megatron-to-hf runs/demo/checkpoints/step_000040 out --hf path/to/Qwen3-8B

    The first example is a checkpoint from hf-to-megatron, the second one from a training run: optimizer state
    is left out; config, tokenizer and dtypes come from --hf. Writes safetensors files without vocabulary
    padding. Memory does not grow with the model. Exit status 2: invalid input; nothing is written.
    """
    import torch

    from megatron_fspo import weights

    model = args.hf or args.source
    arch = weights.read_architecture(model)
    reader = weights.MegatronReader(args.source, arch)
    manifest = weights.read_manifest(args.source)
    with progress_bar(weights.size_in_bytes(reader), "converting") as progress:
        written = weights.write_hf_checkpoint(
            args.out,
            weights.stream(reader, weights.expected_hf_shapes(arch), progress),
            model,
            dtype=args.dtype and getattr(torch, args.dtype),
            max_shard_bytes=_bytes(args.max_shard_size),
            recorded=manifest.tensors if manifest else None,
        )
    files = sorted(path.name for path in args.out.glob("*.safetensors"))
    report = {"out": str(args.out), "tensors": len(written.tensors), "files": files}
    words = f"{args.out}: {len(written.tensors)} tensors in {len(files)} files"
    print(json.dumps(report) if args.json else words)
    return 0


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([1-9][0-9]*)(M|G|Mi|Gi|)B?", text)
    if match is None:
        raise InputError(f"--max-shard-size {text}: must be a size in bytes, such as 5GB, 500MiB or 1000000")
    return int(match[1]) * _UNITS[match[2]]
