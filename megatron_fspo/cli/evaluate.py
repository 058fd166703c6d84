"""The command ``evaluate``, and how its flags become a configuration."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_fspo.cli import command
from megatron_fspo.cli.console import import_megatron
from megatron_fspo.config import Config
from megatron_fspo.config.loading import load_config, make_config
from megatron_fspo.errors import InputError
from megatron_fspo.job.folder import check_writable
from megatron_fspo.weights import read_architecture

_HELP = """\
Accuracy of a checkpoint: mean@k, pass@k and maj@k with 95% intervals over problems.

A checkpoint:             megatron-fspo evaluate --model runs/demo/hf --data math.jsonl aime.jsonl \\
                              --reward exact_match --samples 16 --out evaluations/demo
A number for each file:   ... --samples 4 32
Against another:          ... --compare evaluations/before
From servers of vLLM:     ... --engine vllm --vllm.urls '["http://127.0.0.1:8000"]'
As a run evaluates:       megatron-fspo evaluate --config runs/demo/config.toml --model runs/demo/hf

The folder has table.md, results.json and every completion (samples.jsonl). The same command goes on where a
killed one stopped. Any key of the configuration is an argument too: --model.dtype bfloat16, say.
"""
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
"""Flag → the key that it is another name of."""
SAMPLES = 16
LONGEST_RESPONSE = 4096
"""Tokens, where nobody says; at most half of what the model reads."""


def add_evaluate(commands: command.Commands) -> None:
    """Declare the command."""
    evaluate = command.add(
        commands, "evaluate", run, "sample and grade prompts, with intervals", _HELP, keys=True
    )
    command.add_config(evaluate, "a run, as TOML, in place of the flags")
    flag = evaluate.add_argument
    flag("--model", type=Path, metavar="DIR", help="checkpoint: Hugging Face, or converted to Megatron")
    flag("--data", type=Path, nargs="+", metavar="FILE", help="prompts, a set per file")
    flag("--preset", metavar="NAME", help="how the files name their fields (data.preset)")
    flag("--reward", metavar="NAME", help="the grade of a response (reward.name)")
    flag(
        "--samples",
        type=int,
        nargs="+",
        metavar="N",
        help="responses per prompt (default 16); several: one for each file of --data",
    )
    flag("--temperature", type=float, metavar="T", help="0: greedy (default 1)")
    flag("--top-p", type=float, metavar="P", help="(default 1)")
    flag(
        "--max-response-tokens",
        type=int,
        metavar="N",
        help="longest response (default 4096, at most half of the model's context)",
    )
    flag("--engine", choices=["embedded", "vllm"], help="what samples (default embedded)")
    flag("--out", type=Path, metavar="DIR", help="where results go, or are gone on with")
    flag("--compare", type=Path, metavar="DIR", help="another evaluation's --out")
    command.add_json(evaluate)
    command.add_nproc(evaluate)


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    """Evaluate, and print the metrics."""
    config = config_of(args, overrides)
    import_megatron()

    from megatron_fspo.mcore.startup import job
    from megatron_fspo.trainer.evaluate_checkpoint import evaluate_checkpoint
    from megatron_fspo.trainer.prepare import prepare

    with job():
        inputs = prepare(config, world_size=command.world_size(args), trains=False)
        if not inputs.validation:
            raise InputError("evaluate needs data.validation")
        command.start_ranks(args)

        metrics = evaluate_checkpoint(inputs, out=args.out, other=args.compare)
    if os.environ.get("RANK", "0") == "0":
        if args.json:
            print(json.dumps({name: None if math.isnan(v) else v for name, v in metrics.items()}))
        elif args.out is not None:
            print((args.out / "table.md").read_text(encoding="utf-8"), end="")
        else:
            print("\n".join(f"{name}  {value:.4f}" for name, value in metrics.items()))
    return 0


def config_of(args: argparse.Namespace, overrides: Sequence[str]) -> Config:
    """Make the configuration of ``evaluate``.

    Flags go before overrides, and both before what the file of ``--config`` says. Without one, keys that only
    a training needs are filled in.

    Raises:
        InputError: flags are missing, or wrong together.
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
            # One number given here holds for sets of the file, too, that have another.
            sets = tuple(one.model_copy(update={"samples": None}) for one in config.data.validation_sets)
            if sets != config.data.validation_sets:
                data = config.data.model_copy(update={"validation": sets})
                config = config.model_copy(update={"data": data})
    else:
        missing = [f"--{name}" for name in ("model", "data", "reward", "out") if not getattr(args, name)]
        if missing:
            raise InputError(f"evaluate needs {', '.join(missing)}, or --config")
        config = make_config(_of_flags(args), words, source="evaluate")
    if args.compare is not None and args.out is None:
        raise InputError("--compare needs --out, the folder of this evaluation")
    if args.out is not None:
        check_writable(args.out, key="--out")
    return config


def _sets(files: Sequence[Path], samples: Sequence[int] | None) -> list[str]:
    """The override for the files of ``--data``, each with its number of samples if there are several."""
    if samples is not None and len(samples) != len(files):
        raise InputError(
            f"--samples has {len(samples)} numbers and --data {len(files)} files: give one number for all "
            "sets, or one for each file"
        )
    own = [f", samples = {n}" for n in samples or ()] or [""] * len(files)
    tables = [f"{{file = {json.dumps(str(path))}{n}}}" for path, n in zip(files, own, strict=True)]
    return ["--data.validation", f"[{', '.join(tables)}]"] if tables else []


def _of_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Values for all that the flags leave open; the flags are set over them."""
    longest = read_architecture(args.model).max_position_embeddings
    response = args.max_response_tokens or min(LONGEST_RESPONSE, longest // 2)
    return {
        # The response that a reward fails for is written there.
        "run": {"folder": str(args.out), "name": "evaluation", "steps": 1},
        "model": {},
        "data": {"train": str(args.data[0]), "max_prompt_tokens": max(longest - response, 1)},
        "reward": {},
        "rollout": {"prompts": 1, "max_response_tokens": response},
        "batch": {"mini_batches": 1, "max_tokens": 2 * max(longest, response)},
        "evaluation": {"samples": SAMPLES},
    }
