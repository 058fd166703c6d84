"""``megatron-fspo convert``: convert checkpoints between Hugging Face and Megatron, and compare them."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from megatron_fspo.cli import command
from megatron_fspo.cli.console import progress_bar
from megatron_fspo.errors import InputError

_UNITS = {"": 1, "M": 10**6, "G": 10**9, "Mi": 2**20, "Gi": 2**30}

_TO_MEGATRON_HELP = """\
Convert a Hugging Face checkpoint to a Megatron distributed checkpoint, which any parallel layout can load.

    megatron-fspo convert hf-to-megatron Qwen3-8B Qwen3-8B-megatron

Reads Llama 3, Qwen2, Qwen3, Qwen3-MoE and Mixtral, in bf16, fp16, fp32 or blockwise FP8 (converted to bf16).
Writes config, tokenizer, manifest.json and the weights (torch_dist/). Memory does not grow with the model.
Exit status 2: invalid input; nothing is written.
"""
_TO_HF_HELP = """\
Convert a Megatron distributed checkpoint, saved under any parallel layout, to a Hugging Face checkpoint.

    megatron-fspo convert megatron-to-hf Qwen3-8B-megatron Qwen3-8B-again
    megatron-fspo convert megatron-to-hf runs/demo/checkpoints/step_000040 out --hf path/to/Qwen3-8B

The first example is a checkpoint from hf-to-megatron, the second one from a training run: optimizer state is
left out; config, tokenizer and dtypes come from --hf. Writes safetensors files without vocabulary padding.
Memory does not grow with the model. Exit status 2: invalid input; nothing is written.
"""
_VERIFY_HELP = """\
Compare two checkpoints, Hugging Face or Megatron, bit by bit; with --logits also their log-probs.

    megatron-fspo convert verify Qwen3-8B Qwen3-8B-megatron
    megatron-fspo convert verify Qwen3-8B Qwen3-8B-megatron --logits --layout tp2.pp2
    megatron-fspo convert verify Qwen3-8B-megatron        (against its manifest.json)

--logits scores a few random sequences with transformers (Hugging Face folders only) and with our Megatron
model in the given layout (words joined by dots, such as tp2.sp, pp2, cp2 or ep2), and compares all with the
first. It starts the ranks on this machine. Exit status 0: equal; 1: different; 2: invalid input.
"""


def add_convert(commands: command.Commands) -> None:
    convert = commands.add_parser("convert", help="convert or compare Hugging Face and Megatron checkpoints")
    actions = convert.add_subparsers(dest="action", required=True)
    source = {
        "hf-to-megatron": "config.json and safetensors files",
        "megatron-to-hf": ".metadata or torch_dist/",
    }
    add = {"hf-to-megatron": (run_to_megatron, _TO_MEGATRON_HELP), "megatron-to-hf": (run_to_hf, _TO_HF_HELP)}
    for name, (run, description) in add.items():
        parser = command.add(actions, name, run, description.partition("\n")[0], description)
        parser.add_argument("source", type=Path, help=f"folder with {source[name]}")
        parser.add_argument("out", type=Path, help="output folder; replaces a checkpoint in it")
        command.add_json(parser)
    flag = parser.add_argument  # of megatron-to-hf
    flag("--hf", type=Path, metavar="DIR", help="checkpoint with config, tokenizer and dtypes")
    flag("--max-shard-size", default="5GB", metavar="SIZE", help="maximum size of a file (default 5GB)")
    flag("--dtype", choices=["float32", "bfloat16", "float16"], help="dtype to write (default: unchanged)")
    verify = command.add(actions, "verify", run_verify, "compare two checkpoints bit by bit", _VERIFY_HELP)
    flag = verify.add_argument
    flag("first", type=Path, metavar="A", nargs="?", help="checkpoint folder")
    flag("second", type=Path, metavar="B", nargs="?", help="second folder (default: the manifest of A)")
    flag("--logits", action="store_true", help="also compare log-probs")
    flag("--layout", default="single", help="layout of the Megatron model (default: one rank)")
    flag(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="compute dtype (default float32)"
    )
    flag("--tolerance", type=float, default=1e-4, help="with --logits: maximum |Δ| in nats (default 1e-4)")
    flag("--as-rank", help=argparse.SUPPRESS)
    command.add_json(verify)


def run_to_megatron(args: argparse.Namespace, _: list[str]) -> int:
    from megatron_fspo.weights import HFReader, read_architecture, size_in_bytes, write_megatron_checkpoint

    arch, reader = read_architecture(args.source), HFReader(args.source)
    size = size_in_bytes(reader)
    with progress_bar(size, "converting") as progress:
        manifest = write_megatron_checkpoint(args.out, reader, arch, progress=progress)
    count = len(manifest.tensors)
    report = {"out": str(args.out), "tensors": count, "bytes": size}
    print(json.dumps(report) if args.json else f"{args.out}: {count} tensors, {size:,} bytes")
    return 0


def run_to_hf(args: argparse.Namespace, _: list[str]) -> int:
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


def run_verify(args: argparse.Namespace, _: list[str]) -> int:
    """Compare two checkpoints; exit status 1 if they differ."""
    from megatron_fspo.cli.verify_checkpoint import run

    return run(args)
