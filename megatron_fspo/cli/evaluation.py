"""The arguments of ``evaluate``: a run's configuration, or flags that make one."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_fspo.config import Config
from megatron_fspo.config.loading import load_config, make_config
from megatron_fspo.errors import InputError
from megatron_fspo.weights import read_architecture

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


def config_of(args: argparse.Namespace, overrides: Sequence[str]) -> Config:
    """What ``evaluate`` is to do, as a configuration.

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
            config = _without_own_samples(config)
    else:
        missing = [f"--{name}" for name in ("model", "data", "reward", "out") if not getattr(args, name)]
        if missing:
            raise InputError(f"evaluate needs {', '.join(missing)}, or --config")
        config = make_config(_of_flags(args), words, source="evaluate")
    if args.compare is not None and args.out is None:
        raise InputError("--compare needs --out, the folder of this evaluation")
    if args.out is not None:
        _check_folder(args.out)
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


def _without_own_samples(config: Config) -> Config:
    """One number given on the command line holds for sets of the file too that have another."""
    sets = tuple(one.model_copy(update={"samples": None}) for one in config.data.validation_sets)
    if sets == config.data.validation_sets:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"validation": sets})})


def _of_flags(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags leave open; they are set over it."""
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


def _check_folder(out: Path) -> None:
    """``InputError`` if it could not be made or written; nothing is written to find out."""
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not there.is_dir():
        raise InputError(f"--out {out}: {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"--out {out}: {there} is read-only for this user")
