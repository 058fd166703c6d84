"""The command convert verify: compares the tensors and log-probs of two checkpoints."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_fspo.cli.command import JSON, argument, command, launcher
from megatron_fspo.cli.console import import_megatron, progress_bar
from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.evaluation.tables import columns

if TYPE_CHECKING:
    from megatron_fspo import weights

LENGTHS = (7, 64, 200)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@command(
    argument("first A", "checkpoint folder", Path, nargs="?"),
    argument("second B", "second folder (default: the manifest of A)", Path, nargs="?"),
    argument("--logits", "also compare log-probs"),
    argument("--layout LAYOUT", "layout of the Megatron model (default: one rank)", default="single"),
    argument("--dtype", "compute dtype", default="float32", choices=["float32", "bfloat16"]),
    argument("--tolerance X", "with --logits: maximum |Δ| in nats", float, 1e-4),
    argument("--as-rank TASK", argparse.SUPPRESS),
    JSON,
)
def verify(args: argparse.Namespace, _: list[str]) -> int:
    """Compare two checkpoints, Hugging Face or Megatron, bit by bit; with --logits also their log-probs.

        megatron-fspo convert verify Qwen3-8B Qwen3-8B-megatron
        megatron-fspo convert verify Qwen3-8B Qwen3-8B-megatron --logits --layout tp2.pp2
        megatron-fspo convert verify Qwen3-8B-megatron        (against its manifest.json)

    --logits scores a few random sequences with transformers (Hugging Face folders only) and with our Megatron
    model in the given layout (words joined by dots, such as tp2.sp, pp2, cp2 or ep2), and compares all with
    the first. It starts the ranks on this machine. Exit status 0: equal; 1: different; 2: invalid input.
    """
    if args.as_rank:
        _score_as_rank(**json.loads(args.as_rank))
        return 0
    if args.first is None:
        raise InputError("name a checkpoint folder, or two to compare; see --help for examples")
    if not args.tolerance >= 0:
        raise InputError(f"--tolerance {args.tolerance}: must be at least 0")
    if args.logits:
        _check_logits(args.first, args.second, args.layout)
    differences = list(_bits(args.first, args.second))
    report: dict[str, Any] = {"different_tensors": [vars(difference) for difference in differences]}
    if not args.json:
        print(_describe(differences, args.first, args.second))
    same = not differences
    if args.logits:
        report["log_probs"] = _logits([args.first, args.second], args.layout, args.dtype)
        same &= max(row["max"] for row in report["log_probs"]) <= args.tolerance
        if not args.json:
            print(_table(report["log_probs"], args.tolerance))
    if args.json:
        print(json.dumps({"same": same, **report}))
    return 0 if same else 1


def _check_logits(first: Path, second: Path | None, layout: str) -> None:
    if second is None:
        raise InputError("--logits needs two checkpoints")
    import_megatron()

    from megatron_fspo import weights
    from megatron_fspo.mcore.machine.sizes import check_parallel
    from megatron_fspo.verify.layouts import count_ranks, parse_layout

    check_parallel(
        weights.read_architecture(first), parse_layout(layout, world_size=count_ranks(layout)).parallel
    )


def _bits(first: Path, second: Path | None) -> Iterator[weights.Difference]:
    """Yield tensors and files that differ from the second checkpoint, or else from the manifest."""
    from megatron_fspo import weights
    from megatron_fspo.weights.folder import differing_side_files

    arch = weights.read_architecture(first)
    reader = weights.open_checkpoint(first, arch)
    with progress_bar(weights.size_in_bytes(reader), "comparing") as progress:
        if second is None:
            manifest = weights.read_manifest(first)
            if manifest is None:
                raise InputError(f"{first} has no manifest.json: name a second checkpoint to compare with")
            yield from weights.compare_with_manifest(reader, manifest.tensors, progress)
            return
        other = weights.read_architecture(second)
        if other != arch:
            keys = [key for key, value in vars(arch).items() if value != getattr(other, key)]
            raise InputError(f"{first} and {second} are different models: {', '.join(keys)} differ")
        yield from weights.compare(reader, weights.open_checkpoint(second, arch), arch, progress)
        for name in differing_side_files(first, second):
            yield weights.Difference(name, "is not in both folders, or not the same")


def _describe(differences: Sequence[weights.Difference], first: Path, second: Path | None) -> str:
    what = f"{first} and {second}" if second else f"{first} and its manifest"
    if not differences:
        return f"{what}: bit for bit the same"
    lines = [f"{what}: {len(differences)} tensors or files differ"]
    for diff in differences[:20]:
        detail = f"{diff.values:,} values, by up to {diff.largest:.3g}" if diff.values else diff.what
        lines.append(f"  {diff.name}: {detail}")
    return "\n".join([*lines, *(["  ..."] if len(differences) > 20 else [])])


def _logits(folders: Sequence[Path], layout: str, dtype: str) -> list[dict[str, Any]]:
    """Score sequences with every model; return the log-prob differences from the first, in nats."""
    from megatron_fspo import weights

    arch = weights.read_architecture(folders[0])
    sequences = _sequences(arch)
    scores: dict[str, Tensor] = {}
    for folder in folders:
        if not weights.is_megatron(folder):
            scores[f"{folder}, transformers"] = _transformers_scores(folder, sequences, DTYPES[dtype])
    for folder in folders:
        scores[f"{folder}, Megatron {layout}"] = _megatron_scores(folder, sequences, layout, dtype)
    (name, reference), *others = scores.items()
    if not reference.isfinite().all():
        raise TrainingError(f"{name}: log-probs of random sequences are not finite")
    differences = ((name, (score - reference).abs()) for name, score in others)
    return [{"name": name, "max": d.max().item(), "mean": d.mean().item()} for name, d in differences]


def _sequences(arch: weights.Architecture) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = [min(length, arch.max_position_embeddings) for length in LENGTHS]
    return [torch.randint(arch.vocab_size, (n,), generator=generator).tolist() for n in lengths]


def _transformers_scores(folder: Path, sequences: Sequence[Sequence[int]], dtype: torch.dtype) -> Tensor:
    """Return log-probs [n] of all tokens but the first of each sequence."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True).eval()
    scores = []
    for sequence in sequences:
        tokens = torch.tensor([sequence])
        with torch.no_grad():
            log_probs = model(tokens).logits[0, :-1].float().log_softmax(-1)
        scores.append(log_probs.gather(-1, tokens[0, 1:, None])[:, 0])
    return torch.cat(scores)


def _megatron_scores(folder: Path, sequences: Sequence[Sequence[int]], layout: str, dtype: str) -> Tensor:
    """The same from our Megatron model, on one process per rank of the layout."""
    from megatron_fspo.verify.layouts import count_ranks

    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "scores.safetensors"
        task = {
            "folder": str(folder), "sequences": sequences, "layout": layout, "dtype": dtype, "out": str(out),
        }  # fmt: skip
        words = launcher(count_ranks(layout), ["convert", "verify", "--as-rank", json.dumps(task)])
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        if done.returncode or not out.is_file():
            reported = [line for line in done.stderr.splitlines() if line.startswith("megatron-fspo: ")]
            problem = reported[0].removeprefix("megatron-fspo: ") if reported else done.stderr[-2000:]
            raise InputError(f"{folder} under {layout}: {problem}")
        log_probs: Tensor = load_file(out)["log_probs"]
        return log_probs


def _score_as_rank(folder: str, sequences: list[list[int]], layout: str, dtype: str, out: str) -> None:
    import_megatron()

    from megatron_fspo.mcore.machine.backend import choose_backend
    from megatron_fspo.mcore.machine.startup import stop
    from megatron_fspo.mcore.passes.score import score_checkpoint
    from megatron_fspo.verify.layouts import parse_layout

    parallel = parse_layout(layout, world_size=int(os.environ["WORLD_SIZE"])).parallel
    try:
        scores = score_checkpoint(
            Path(folder), sequences, parallel=parallel, backend=choose_backend(), dtype=DTYPES[dtype]
        )
    finally:
        stop()
    if scores is not None:
        save_file({"log_probs": torch.cat(scores)}, out)


def _table(rows: Sequence[dict[str, Any]], tolerance: float) -> str:
    head = [f"log-probs of {sum(LENGTHS) - len(LENGTHS)} tokens", "max |Δ|", "mean |Δ|"]
    lines = columns(head, [(row["name"], f"{row['max']:.1e}", f"{row['mean']:.1e}") for row in rows])
    met = "within" if max(row["max"] for row in rows) <= tolerance else "beyond"
    return "\n".join([*lines, f"{met} the tolerance of {tolerance:g}"])
