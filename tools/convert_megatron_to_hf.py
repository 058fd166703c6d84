"""Convert a Megatron distributed checkpoint, saved under any parallel layout, to a Hugging Face one.

    python tools/convert_megatron_to_hf.py Qwen3-8B-megatron Qwen3-8B-again
    python tools/convert_megatron_to_hf.py runs/demo/checkpoints/step_000040 out --hf path/to/Qwen3-8B

The first was made by convert_hf_to_megatron.py, the second by a training run: it has weights (and an
optimizer, which is left out), and takes config, tokenizer and dtypes from --hf. Files are safetensors; the
padding of the vocabulary is gone. Memory does not grow with the model. Exit status 0 done, 2 wrong input,
told in one line; then nothing is left behind.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import torch

from megatron_fspo.cli.console import OneLineParser, exit_status, progress_bar
from megatron_fspo.errors import InputError
from megatron_fspo.weights import (
    MegatronReader,
    expected_hf_shapes,
    read_architecture,
    read_manifest,
    size_in_bytes,
    stream,
    write_hf_checkpoint,
)

_UNITS = {"": 1, "M": 10**6, "G": 10**9, "Mi": 2**20, "Gi": 2**30}


def main() -> int:
    args = _parser().parse_args()
    model = args.hf or args.source
    arch = read_architecture(model)
    reader = MegatronReader(args.source, arch)
    manifest = read_manifest(args.source)
    with progress_bar(size_in_bytes(reader), "converting") as progress:
        written = write_hf_checkpoint(
            args.out,
            stream(reader, expected_hf_shapes(arch), progress),
            model,
            dtype=args.dtype and getattr(torch, args.dtype),
            max_shard_bytes=_bytes(args.max_shard_size),
            recorded=manifest.tensors if manifest else None,
        )
    files = sorted(path.name for path in args.out.glob("*.safetensors"))
    if args.json:
        print(json.dumps({"out": str(args.out), "tensors": len(written.tensors), "files": files}))
    else:
        print(f"{args.out}: {len(written.tensors)} tensors in {len(files)} files")
    return 0


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([1-9][0-9]*)(M|G|Mi|Gi|)B?", text)
    if match is None:
        raise InputError(f"--max-shard-size {text}: a number of bytes, such as 5GB, 500MiB or 1000000")
    return int(match[1]) * _UNITS[match[2]]


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("source", type=Path, help="folder with .metadata, or with torch_dist/")
    parser.add_argument("out", type=Path, help="folder to make; an earlier checkpoint there is replaced")
    parser.add_argument(
        "--hf", type=Path, metavar="DIR", help="checkpoint to take config, tokenizer and dtypes from"
    )
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file (default 5GB)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of all tensors")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    return parser


if __name__ == "__main__":
    sys.exit(exit_status(main, "convert_megatron_to_hf"))
