"""The commands verify, data, serve, status and doctor."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, get_args

from megatron_fspo.cli import command
from megatron_fspo.cli.console import import_megatron
from megatron_fspo.config.data import Data, DataSet, PresetName
from megatron_fspo.config.loading import load_config
from megatron_fspo.errors import InputError

_VERIFY_HELP = """\
Check the gradient of parallel layouts, parameter by parameter, against one process in float64.

A small Qwen3 runs with the same weights and the same uneven batch in every layout. Log-probs, S, loss, clip
decisions, gradients and the number of collectives are compared, for every loss and several splits into
micro-batches. Run it on your cluster before a long job.

On this CPU:              megatron-fspo verify --nproc 8 --all
A few layouts:            megatron-fspo verify --nproc 8 --layouts tp2.pp2.cp2 tp2.sp.cp2.do
Your run's layout:        torchrun --nproc-per-node 8 -m megatron_fspo verify --config run.toml
The same without GPUs:    megatron-fspo verify --nproc 8 --config run.toml --model.backend cpu

A layout is made of words joined by dots: tpN, sp, ppN, vppN (virtual stages), cpN, epN, moe (a mixture of
experts, without epN), dpN, do (distributed optimizer), overlap, recompute. Exit status 1: a case failed; its
worst parameter is named.
"""

_DATA_HELP = """\
Check data files before a run: row counts, duplicates, lengths, errors, and three prompts of each file.

A public data set:         megatron-fspo data check dapo.parquet --preset dapo
Lengths in tokens:         ... --tokenizer Qwen3-8B
The files of a run:        megatron-fspo data check --config run.toml

With `environment.role` in the configuration it also checks that the chat template only appends to a
conversation. Exit status 1: a run would refuse a file, or no verifier can read some of the answers.
"""

_SERVE_HELP = """\
Run vLLM servers for the rollouts of `megatron-fspo train`, until Ctrl-C, SIGTERM or the parent process ends.

On this machine:          megatron-fspo serve --model runs/make-sum-32/checkpoint
On four GPUs, two each:   megatron-fspo serve --model Qwen3-8B --gpus 4-7 --gpus-per-server 2
More flags for vLLM:      megatron-fspo serve --model Qwen3-8B -- --max-num-seqs 512

vLLM needs a separate environment (`make .venv-vllm/.ready` creates one for a CPU). Servers that crash are
restarted. Clients of a server can run code on it, so on other addresses than loopback it requires a key: set
VLLM_API_KEY here and for the trainer.

On another machine:       VLLM_API_KEY=$(cat key) megatron-fspo serve --model Qwen3-8B --host 10.0.0.7
"""


def add_verify(commands: command.Commands) -> None:
    text = "check the gradient of parallel layouts"
    verify = command.add(commands, "verify", run_verify, text, _VERIFY_HELP, keys=True)
    which = verify.add_mutually_exclusive_group()
    which.add_argument("--layouts", nargs="+", metavar="LAYOUT", help="such as tp2.pp2.cp2; dp is the rest")
    which.add_argument("--all", action="store_true", help="every layout that fits the ranks (default)")
    command.add_config(verify, "configuration (TOML): check its layout and loss with a small model")
    verify.add_argument(
        "--dtype",
        nargs="+",
        choices=["float32", "float64", "bfloat16"],
        help="compute dtypes (default: float32 and float64; with Transformer Engine bfloat16)",
    )
    verify.add_argument("--json", type=Path, metavar="FILE", help="write all cases to this file")
    command.add_nproc(verify)


def run_verify(args: argparse.Namespace, overrides: list[str]) -> int:
    """Compare layouts; exit status 1 if a case fails."""
    config = load_config(args.config, overrides) if args.config else None
    ranks = command.world_size(args)
    import_megatron()

    from megatron_fspo.verify.command import plan, run

    if args.json and not os.access(args.json.absolute().parent, os.W_OK):
        raise InputError(f"--json {args.json}: {args.json.absolute().parent} is not a writable folder")
    planned = plan(config, args.layouts, args.dtype, use_all=args.all, world_size=ranks)
    command.start_ranks(args)

    from megatron_fspo.mcore.startup import job

    with job():
        passed = run(planned, config, args.json)
    return 0 if passed else 1


def add_data(commands: command.Commands) -> None:
    data = commands.add_parser("data", help="check data files")
    actions = data.add_subparsers(dest="action", required=True)
    text = "row counts, duplicates, lengths, errors"
    check = command.add(actions, "check", run_data_check, text, _DATA_HELP)
    flag = check.add_argument
    flag("files", type=Path, nargs="*", metavar="FILE", help="jsonl or parquet file")
    flag("--preset", choices=get_args(PresetName), help="format of the files")
    flag("--tokenizer", type=Path, metavar="DIR", help="checkpoint whose tokenizer and chat template to use")
    command.add_config(check, "configuration (TOML): use its [data], tokenizer and, without FILE, files")
    command.add_json(check)


def run_data_check(args: argparse.Namespace, _: list[str]) -> int:
    """Describe data files; exit status 1 if a run would refuse one."""
    from megatron_fspo.data.check import examine
    from megatron_fspo.data.tasks import source_of
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
    findings = [examine(source_of(data, one), tokenizer, data.max_prompt_tokens) for one in sets]
    if config and not args.files:
        samples = config.evaluation_samples.values()
        for one, number in zip(findings[len(data.train_sets) :], samples, strict=True):
            one.samples = number
    print(
        json.dumps([as_json(one) for one in findings]) if args.json else "\n\n".join(map(describe, findings))
    )
    if config and config.environment.role and not args.json:
        before, after = frame(tokenizer, config.environment.role)
        print(f"\nenvironment: inserted text stands between {before!r} and {after!r}, after the turn")
    return 0 if all(one.fine for one in findings) else 1


def add_serve(commands: command.Commands) -> None:
    text = "run vLLM servers for rollouts"
    serve = command.add(commands, "serve", run_serve, text, _SERVE_HELP)
    flag = serve.add_argument
    flag("--model", type=Path, required=True, metavar="DIR", help="Hugging Face checkpoint")
    flag("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    flag("--port", type=int, default=8000, help="port of the first server (default: %(default)s)")
    flag(
        "--backend",
        choices=["gloo", "disk", "nccl"],
        default="gloo",
        help="weight transfer (default: %(default)s)",
    )
    flag("--gpus", metavar="LIST", help="GPUs such as 0-7, for servers on consecutive ports")
    flag(
        "--gpus-per-server",
        type=int,
        default=1,
        metavar="N",
        help="tensor parallel size (default: %(default)s)",
    )
    flag(
        "--colocated",
        action="store_true",
        help="share the GPUs with the trainer (vllm.colocated = true)",
    )
    flag("--routes", action="store_true", help="return the experts of each token (moe.replay = rollout)")
    flag("--lora-rank", type=int, default=0, metavar="N", help="largest LoRA rank to serve (lora.rank)")
    flag("--announce", type=Path, metavar="DIR", help="shared folder to announce servers in (vllm.discovery)")
    flag("--dtype", default="auto", help="dtype of weights and activations (default: the model's)")
    flag("--log", type=Path, metavar="FILE", help="log file (default: runs/vllm-PORT.log)")
    flag("--vllm", metavar="PATH", help="the vllm program (default: $VLLM_BIN, or vllm on PATH)")
    flag("--keep-alive", action="store_true", help="keep running when the parent process ends")
    flag(
        "--anyone-may-run-code",
        action="store_true",
        help="allow non-loopback addresses without a key: anyone who reaches the port can run code here",
    )
    flag("extra", nargs="*", metavar="-- FLAGS", help="further flags for vllm serve")


def run_serve(args: argparse.Namespace, _: list[str]) -> int:
    from megatron_fspo.rollout.server.flags import ServerOptions
    from megatron_fspo.rollout.server.supervise import assign_gpus, gpu_numbers, supervise_all

    names = (
        "model host port backend dtype log colocated routes lora_rank announce anyone_may_run_code".split()
    )
    given = {name: getattr(args, name) for name in names}
    options = ServerOptions(program=args.vllm, extra=tuple(args.extra), **given)
    servers = assign_gpus(options, gpu_numbers(args.gpus), args.gpus_per_server) if args.gpus else [options]
    return supervise_all(servers, keep_alive=args.keep_alive)


def add_status(commands: command.Commands) -> None:
    text = "show what a run is doing, rank by rank"
    description = (
        "Show what each rank of a run is doing, from files in the run's folder. Exit status 1: a rank sends "
        "no heartbeat, or the job is gone; 2: there is no such run."
    )
    status = command.add(commands, "status", run_status, text, description)
    status.add_argument("folder", type=Path, help="the run's folder, such as runs/demo")
    command.add_json(status)


def run_status(args: argparse.Namespace, _: list[str]) -> int:
    """Print what a run is doing; exit status 1 if it has a problem."""
    from megatron_fspo.lab.status import examine, render

    run = examine(args.folder)
    print(json.dumps(run.as_json()) if args.json else render(run))
    return 1 if run.problems else 0


def add_doctor(commands: command.Commands) -> None:
    text = "show what is installed, what a run would use, and what is missing"
    doctor = command.add(commands, "doctor", run_doctor, text)
    doctor.add_argument(
        "trainer", nargs="?", choices=["verl"], help="check that FSPO is registered in this trainer"
    )
    command.add_config(doctor, "configuration (TOML): show the attention backend for its shapes")
    command.add_json(doctor)


def run_doctor(args: argparse.Namespace, _: list[str]) -> int:
    """Print what is installed; with a trainer, exit status 1 if FSPO is not registered in it."""
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
