"""The commands verify, data check, serve, status and doctor."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, get_args

from megatron_fspo.cli.command import (
    JSON,
    NPROC,
    argument,
    command,
    config_files,
    either,
    start_ranks,
    world_size,
)
from megatron_fspo.cli.console import import_megatron
from megatron_fspo.config.data import Data, DataSet, PresetName
from megatron_fspo.config.loading import load_config
from megatron_fspo.errors import InputError


@command(
    "check the gradient of parallel layouts",
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
    "row counts, duplicates, lengths, errors",
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
    from megatron_fspo.data.tasks import make_source
    from megatron_fspo.data.tokenizer import load_tokenizer
    from megatron_fspo.environments.text import frame
    from megatron_fspo.lab.data_check import as_json, describe

    config = load_config(args.config) if args.config else None
    if config is None and not args.files:
        raise InputError("data check: name files, or a run with --config")
    data = config.data if config else Data(train=Path())
    data = data.model_copy(update={"preset": args.preset} if args.preset else {})
    sets = [DataSet(file=file) for file in args.files] or [*data.train_sets, *data.validation_sets]
    folder = args.tokenizer or (config.model.checkpoint if config else None)
    tokenizer = load_tokenizer(folder) if folder else None
    findings = [examine(make_source(data, dataset), tokenizer, data.max_prompt_tokens) for dataset in sets]
    if config and not args.files:
        samples = config.evaluation_samples.values()
        for finding, number in zip(findings[len(data.train_sets) :], samples, strict=True):
            finding.samples = number
    print(json.dumps([*map(as_json, findings)]) if args.json else "\n\n".join(map(describe, findings)))
    if config and config.environment.role and not args.json:
        before, after = frame(tokenizer, config.environment.role)
        print(f"\nenvironment: inserted text stands between {before!r} and {after!r}, after the turn")
    return 0 if all(finding.fine for finding in findings) else 1


@command(
    "run vLLM servers for rollouts",
    argument("--model DIR", "Hugging Face checkpoint", Path, required=True),
    argument("--host HOST", "address to listen on", default="127.0.0.1"),
    argument("--port PORT", "port of the first server", int, 8000),
    argument("--backend", "weight transfer", default="gloo", choices=["gloo", "disk", "nccl"]),
    argument("--gpus LIST", "GPUs such as 0-7, for servers on consecutive ports"),
    argument("--gpus-per-server N", "tensor parallel size", int, 1),
    argument("--colocated", "share the GPUs with the trainer (vllm.colocated = true)"),
    argument("--routes", "return the experts of each token (moe.replay = rollout)"),
    argument("--lora-rank N", "largest LoRA rank to serve (lora.rank)", int, 0),
    argument("--announce DIR", "shared folder to announce servers in (vllm.discovery)", Path),
    argument("--dtype DTYPE", "dtype of weights and activations (default: the model's)", default="auto"),
    argument("--log FILE", "log file (default: runs/vllm-PORT.log)", Path),
    argument("--vllm PATH", "the vllm program (default: $VLLM_BIN, or vllm on PATH)"),
    argument("--keep-alive", "keep running when the parent process ends"),
    argument(
        "--anyone-may-run-code",
        "allow non-loopback addresses without a key: anyone who reaches the port can run code here",
    ),
    argument("extra -- FLAGS", "further flags for vllm serve", nargs="*"),
)
def serve(args: argparse.Namespace, _: list[str]) -> int:
    """Run vLLM servers for the rollouts of `megatron-fspo train`.

    They run until Ctrl-C, SIGTERM or the end of the parent process.

    On this machine:          megatron-fspo serve --model runs/make-sum-32/checkpoint
    On four GPUs, two each:   megatron-fspo serve --model Qwen3-8B --gpus 4-7 --gpus-per-server 2
    More flags for vLLM:      megatron-fspo serve --model Qwen3-8B -- --max-num-seqs 512

    vLLM needs a separate environment (`make .venv-vllm/.ready` creates one for a CPU). Servers that crash are
    restarted. Clients of a server can run code on it, so on other addresses than loopback it requires a key:
    set VLLM_API_KEY here and for the trainer.

    On another machine:       VLLM_API_KEY=$(cat key) megatron-fspo serve --model Qwen3-8B --host 10.0.0.7
    """
    from megatron_fspo.rollout.server.flags import ServerOptions
    from megatron_fspo.rollout.server.supervise import assign_gpus, gpu_numbers, supervise_all

    names = "model host port backend dtype log colocated routes lora_rank announce anyone_may_run_code"
    given = {name: getattr(args, name) for name in names.split()}
    options = ServerOptions(program=args.vllm, extra=tuple(args.extra), **given)
    servers = assign_gpus(options, gpu_numbers(args.gpus), args.gpus_per_server) if args.gpus else [options]
    return supervise_all(servers, keep_alive=args.keep_alive)


@command(
    "show what a run is doing, rank by rank",
    argument("folder", "the run's folder, such as runs/demo", Path, nargs="?"),
    argument("--hang DUMPS", "folder, or begin of the names, of dumps of torch's flight recorder", Path),
    JSON,
)
def status(args: argparse.Namespace, _: list[str]) -> int:
    """Show what each rank of a run is doing, from files in the run's folder.

    With --hang, show which rank did not come to the collective in which the others wait, and both lines.
    Exit status 1: a rank sends no heartbeat, is awaited, or the job is gone; 2: there is no such run.
    """
    if (args.folder is None) == (args.hang is None):
        raise InputError("status: name the folder of a run, or with --hang that of dumps")
    if args.hang is not None:
        from megatron_fspo.lab.hang import examine as examine_dumps

        found = examine_dumps(args.hang)
        print(json.dumps(found) if args.json else "\n".join(found) or "no rank waits, and all agree")
        return 1 if found else 0
    from megatron_fspo.lab.status import examine, render

    run = examine(args.folder)
    print(json.dumps(run.as_json()) if args.json else render(run))
    return 1 if run.problems else 0


@command(
    "show what is installed, what a run would use, and what is missing",
    argument("trainer", "check that FSPO is registered in this trainer", nargs="?", choices=["verl"]),
    config_files("configuration (TOML): show the attention backend for its shapes"),
    JSON,
)
def doctor(args: argparse.Namespace, _: list[str]) -> int:
    """Print what is installed; with a trainer, exit with status 1 if FSPO is not registered in it."""
    from megatron_fspo.cli.doctor import examine, render, verl_problem

    if args.trainer is not None:
        why = verl_problem()
        said = "verl has the policy loss fspo" if why is None else f"verl has no policy loss fspo: {why}"
        findings: dict[str, Any] = {"trainer": "verl", "registered": why is None, "problem": why}
        print(json.dumps(findings) if args.json else said)
        return 0 if why is None else 1
    findings = examine(load_config(args.config, []) if args.config else None)
    print(json.dumps(findings) if args.json else render(findings))
    return 0
