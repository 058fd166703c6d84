"""The commands verify and data check."""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import get_args

from megatron_fspo.cli.command import (
    JSON,
    NPROC,
    argument,
    command,
    config_files,
    either,
    start_ranks,
    world_size,
)  # fmt: skip
from megatron_fspo.cli.console import import_megatron
from megatron_fspo.config.data import Data, DataSet, PresetName
from megatron_fspo.config.loading import load_config
from megatron_fspo.errors import InputError


@command(
    either(
        argument("--layouts LAYOUT", "such as tp2.pp2.cp2; dp is the rest", nargs="+"),
        argument("--all", "every layout that fits the ranks (default)"),
    ),
    config_files("configuration (TOML): check its layout and loss with a small model"),
    argument(
        "--dtype",
        "compute dtypes (default: float32 and float64; with Transformer Engine bfloat16)",
        nargs="+",
        choices=["float32", "float64", "bfloat16"],
    ),
    argument("--json FILE", "write all cases to this file", Path),
    NPROC,
    keys=True,
)
def verify(args: argparse.Namespace, overrides: list[str]) -> int:
    """Check the gradient of parallel layouts, parameter by parameter, against one process in float64.

    A small Qwen3 runs with the same weights and the same uneven batch in every layout. Log-probs, S, loss,
    clip decisions, gradients and the number of collectives are compared, for every loss and several splits
    into micro-batches. Run it on your cluster before a long job.

    On this CPU:              megatron-fspo verify --nproc 8 --all
    A few layouts:            megatron-fspo verify --nproc 8 --layouts tp2.pp2.cp2 tp2.sp.cp2.do
    Your run's layout:        torchrun --nproc-per-node 8 -m megatron_fspo verify --config run.toml
    The same without GPUs:    megatron-fspo verify --nproc 8 --config run.toml --model.backend cpu

    A layout is made of words joined by dots: tpN, sp, ppN, vppN (virtual stages), cpN, epN, moe (a mixture of
    experts, without epN), dpN, do (distributed optimizer), overlap, recompute. Exit status 1: a case failed;
    its worst parameter is named.
    """
    config = load_config(args.config, overrides) if args.config else None
    ranks = world_size(args)
    import_megatron()

    from megatron_fspo.verify.command import plan, run

    if args.json and not os.access(args.json.absolute().parent, os.W_OK):
        raise InputError(f"--json {args.json}: {args.json.absolute().parent} is not a writable folder")
    planned = plan(config, args.layouts, args.dtype, use_all=args.all, world_size=ranks)
    start_ranks(args)

    from megatron_fspo.mcore.machine.startup import job

    with job():
        passed = run(planned, config, args.json)
    return 0 if passed else 1


@command(
    argument("files FILE", "jsonl or parquet file", Path, nargs="*"),
    argument("--preset", "format of the files", choices=get_args(PresetName)),
    argument("--tokenizer DIR", "checkpoint whose tokenizer and chat template to use", Path),
    config_files("configuration (TOML): use its [data], tokenizer and, without FILE, files"),
    JSON,
)
def check(args: argparse.Namespace, _: list[str]) -> int:
    """Check data files before a run: row counts, duplicates, lengths, errors, and three prompts of each file.

    A public data set:         megatron-fspo data check dapo.parquet --preset dapo
    Lengths in tokens:         ... --tokenizer Qwen3-8B
    The files of a run:        megatron-fspo data check --config run.toml

    With `environment.role` in the configuration it also checks that the chat template only appends to a
    conversation. Exit status 1: a run would refuse a file, or no verifier can read some of the answers.
    """
    from megatron_fspo.data.check import examine
    from megatron_fspo.data.hub import find_checkpoint, find_data
    from megatron_fspo.data.tasks import make_source
    from megatron_fspo.data.tokenizer import load_tokenizer, stop_token_ids
    from megatron_fspo.environments.text import frame
    from megatron_fspo.lab.data_check import as_json, describe

    config = load_config(args.config) if args.config else None
    if config is None and not args.files:
        raise InputError("data check: name files, or a run with --config")
    data = config.data if config else Data(train=Path())
    data = data.model_copy(update={"preset": args.preset} if args.preset else {})
    if args.files:
        named = data.model_copy(update={"train": tuple(DataSet(file=file) for file in args.files)})
        sets = list(find_data(named.model_copy(update={"validation": None})).train_sets)
    else:
        data = find_data(data)
        sets = [*data.train_sets, *data.validation_sets]
    folder = args.tokenizer or (config.model.checkpoint if config else None)
    folder = find_checkpoint(folder, weights=False) if folder else None
    tokenizer = load_tokenizer(folder) if folder else None
    further = config.rollout.stop_token_ids if config else ()
    stops = stop_token_ids(tokenizer, folder, further) if tokenizer and folder else ()
    longest = (data.max_prompt_tokens, stops, config.rollout.max_response_tokens if config else math.inf)
    findings = [examine(make_source(data, one), tokenizer, *longest) for one in sets]
    if config and not args.files:
        samples = config.evaluation_samples.values()
        for finding, number in zip(findings[len(data.train_sets) :], samples, strict=True):
            finding.samples = number
    print(json.dumps([*map(as_json, findings)]) if args.json else "\n\n".join(map(describe, findings)))
    if config and config.environment.role and not args.json:
        before, after = frame(tokenizer, config.environment.role)
        print(f"\nenvironment: inserted text stands between {before!r} and {after!r}, after the turn")
    return 0 if all(finding.fine for finding in findings) else 1
