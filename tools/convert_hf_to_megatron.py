"""Convert a Hugging Face checkpoint to a Megatron distributed one, which any parallel layout can load.

    python tools/convert_hf_to_megatron.py Qwen3-8B Qwen3-8B-megatron

Llama 3, Qwen2, Qwen3, Qwen3-MoE and Mixtral; bf16, fp16, fp32, or blockwise FP8 (which becomes bf16). The
folder gets config, tokenizer and manifest.json, and torch_dist/ with the weights. Memory does not grow with
the model.
Exit status 0 done, 2 wrong input, told in one line; then nothing is left behind.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from megatron_fspo.cli.console import OneLineParser, exit_status, progress_bar
from megatron_fspo.weights import HFReader, read_architecture, size_in_bytes, write_megatron_checkpoint


def main() -> int:
    args = _parser().parse_args()
    arch = read_architecture(args.source)
    reader = HFReader(args.source)
    with progress_bar(size_in_bytes(reader), "converting") as progress:
        manifest = write_megatron_checkpoint(args.out, reader, arch, progress=progress)
    if args.json:
        print(
            json.dumps(
                {"out": str(args.out), "tensors": len(manifest.tensors), "bytes": size_in_bytes(reader)}
            )
        )
    else:
        print(f"{args.out}: {len(manifest.tensors)} tensors, {size_in_bytes(reader):,} bytes")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("source", type=Path, help="folder with config.json and safetensors files")
    parser.add_argument("out", type=Path, help="folder to make; an earlier checkpoint there is replaced")
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    return parser


if __name__ == "__main__":
    sys.exit(exit_status(main, "convert_hf_to_megatron"))
