"""The command ``evaluate``."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_fspo.cli.command import JSON, NPROC, argument, command, config_files, start_ranks, world_size
from megatron_fspo.cli.console import import_megatron
from megatron_fspo.config import Config
from megatron_fspo.config.loading import load_config, make_config
from megatron_fspo.errors import InputError
from megatron_fspo.job.resume import check_writable

KEYS = {
    "model": "model.checkpoint",
    "preset": "data.preset",
    "reward": "reward.name",
    "samples": "evaluation.samples",
    "temperature": "evaluation.temperature",
    "top_p": "evaluation.top_p",
    "max_response_tokens": "rollout.max_response_tokens",
    "engine": "rollout.engine",
}
"""Flag → the configuration key that it sets."""
SAMPLES = 16
LONGEST_RESPONSE = 4096
"""Default of the longest response in tokens, but at most half of the model's context."""


@command(
    config_files("configuration (TOML), which flags override"),
    argument("--model DIR", "checkpoint, Hugging Face or converted to Megatron", Path),
    argument("--data FILE", "prompts, one set per file", Path, nargs="+"),
    argument("--preset NAME", "format of the files (data.preset)"),
    argument("--reward NAME", "reward that grades responses (reward.name)"),
    argument(
        "--samples N",
        "responses per prompt (default 16), one number or one per file of --data",
        int,
        nargs="+",
    ),
    argument("--temperature T", "sampling temperature; 0: greedy (default 1)", float),
    argument("--top-p P", "nucleus sampling (default 1)", float),
    argument(
        "--max-response-tokens N", "longest response (default 4096, at most half of the model's context)", int
    ),
    argument("--engine", "sampling engine (default embedded)", choices=["embedded", "vllm"]),
    argument("--out DIR", "folder of the results, new or of an interrupted evaluation", Path),
    argument("--compare DIR", "folder of another evaluation, to compare with", Path),
    JSON,
    NPROC,
    keys=True,
)
def evaluate(args: argparse.Namespace, overrides: list[str]) -> int:
    """Measure the accuracy of a checkpoint: mean@k, pass@k and maj@k with 95% intervals over problems.

    A checkpoint:             megatron-fspo evaluate --model runs/demo/hf --data math.jsonl aime.jsonl \\
                                  --reward exact_match --samples 16 --out evaluations/demo
    Samples for each file:    ... --samples 4 32
    Compare with another:     ... --compare evaluations/before
    Sample from vLLM servers: ... --engine vllm --vllm.urls '["http://127.0.0.1:8000"]'
    Settings of a run:        megatron-fspo evaluate --config runs/demo/config.toml --model runs/demo/hf

    Writes table.md, results.json and all completions (samples.jsonl) to the folder. The same command
    continues an interrupted evaluation. Any configuration key is also an argument, such as --model.dtype
    bfloat16.
    """
    config = make_evaluation_config(args, overrides)
    import_megatron()

    from megatron_fspo.mcore.machine.startup import job
    from megatron_fspo.trainer.evaluate_checkpoint import evaluate_checkpoint
    from megatron_fspo.trainer.prepare import prepare

    with job():
        inputs = prepare(config, world_size=world_size(args), trains=False)
        if not inputs.validation:
            raise InputError("evaluate needs data.validation")
        start_ranks(args)

        metrics = evaluate_checkpoint(inputs, out=args.out, other=args.compare)
    if os.environ.get("RANK", "0") == "0":
        if args.json:
            print(json.dumps({name: None if math.isnan(v) else v for name, v in metrics.items()}))
        elif args.out is not None:
            print((args.out / "table.md").read_text(encoding="utf-8"), end="")
        else:
            print("\n".join(f"{name}  {value:.4f}" for name, value in metrics.items()))
    return 0


def make_evaluation_config(args: argparse.Namespace, overrides: Sequence[str]) -> Config:
    """Make the configuration of ``evaluate``.

    Overrides take precedence over flags, and flags over the files of ``--config``. Without ``--config``, keys
    that only training needs get placeholder values. Raises ``InputError`` if flags are missing or conflict.
    """
    alike = args.samples[0] if args.samples and len(args.samples) == 1 else None
    flags = vars(args) | {"samples": alike}
    words = [word for flag, key in KEYS.items() if (value := flags[flag]) is not None
             for word in (f"--{key}", str(value))]  # fmt: skip
    words += _sets(args.data or (), args.samples if alike is None else None)
    words += overrides
    if args.config is not None:
        config = load_config(args.config, words)
        if alike is not None and not any(word.startswith("--data.validation") for word in overrides):
            # One number on the command line also replaces numbers of single sets in the file.
            sets = tuple(entry.model_copy(update={"samples": None}) for entry in config.data.validation_sets)
            if sets != config.data.validation_sets:
                data = config.data.model_copy(update={"validation": sets})
                config = config.model_copy(update={"data": data})
    else:
        missing = [f"--{name}" for name in ("model", "data", "reward", "out") if not getattr(args, name)]
        if missing:
            raise InputError(f"evaluate needs {', '.join(missing)}, or --config")
        config = make_config(_values_from_flags(args), words, source="evaluate")
    if args.compare is not None and args.out is None:
        raise InputError("--compare needs --out, the folder of this evaluation")
    if args.out is not None:
        check_writable(args.out, key="--out")
    return config


def _sets(files: Sequence[Path], samples: Sequence[int] | None) -> list[str]:
    """Return the override for the files of ``--data``, with their numbers of samples if given per file."""
    if samples is not None and len(samples) != len(files):
        raise InputError(
            f"--samples has {len(samples)} numbers and --data {len(files)} files: give one number, or one "
            "for each file"
        )
    own = [f", samples = {n}" for n in samples or ()] or [""] * len(files)
    tables = [f"{{file = {json.dumps(str(path))}{n}}}" for path, n in zip(files, own, strict=True)]
    return ["--data.validation", f"[{', '.join(tables)}]"] if tables else []


def _values_from_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return values for the required keys; flags override them."""
    from megatron_fspo.weights import read_architecture

    longest = read_architecture(args.model).max_position_embeddings
    response = args.max_response_tokens or min(LONGEST_RESPONSE, longest // 2)
    return {
        # A response whose reward fails is written there.
        "run": {"folder": str(args.out), "name": "evaluation", "steps": 1},
        "model": {},
        "data": {"train": str(args.data[0]), "max_prompt_tokens": max(longest - response, 1)},
        "reward": {},
        "rollout": {"prompts": 1, "max_response_tokens": response},
        "batch": {"mini_batches": 1, "max_tokens": 2 * max(longest, response)},
        "evaluation": {"samples": SAMPLES},
    }
