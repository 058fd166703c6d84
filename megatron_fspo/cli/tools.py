"""The commands around a run: verify, data, serve, status, doctor."""

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
Compare the gradient of parallel layouts, parameter by parameter, with one process in float64.

A small Qwen3 gets the same weights and the same very uneven batch in every layout; log-probs, S, loss, clip
decisions, gradients and the number of collectives are compared, for every loss and several splits into
micro-batches. Run it on your cluster before a long job.

Here, on the CPU:         megatron-fspo verify --nproc 8 --all
A few layouts:            megatron-fspo verify --nproc 8 --layouts tp2.pp2.cp2 tp2.sp.cp2.do
Your run's layout:        torchrun --nproc-per-node 8 -m megatron_fspo verify --config run.toml
The same without GPUs:    megatron-fspo verify --nproc 8 --config run.toml --model.backend cpu

A layout is words joined by dots: tpN, sp, ppN, vppN (virtual stages), cpN, epN, moe (experts, as with epN),
dpN, do (distributed optimizer), overlap, recompute. Exit status 1 if a case fails; the worst parameter is
named.
"""

_DATA_HELP = """\
Look into data files before a run: counts, duplicates, lengths, what is wrong, and three prompts of each.

A file of a known format:  megatron-fspo data check dapo.parquet --preset dapo
Lengths in tokens:         ... --tokenizer Qwen3-8B
The files of a run:        megatron-fspo data check --config run.toml

Of a run with `environment.role` it proves that the chat template adds to a conversation, and writes nothing
of it anew. Exit status 1 if a run would refuse a file, or if there are answers that no verifier can read.
"""

_SERVE_HELP = """\
Run vLLM for the rollouts of `megatron-fspo train`, until Ctrl-C, SIGTERM or the end of what started this.

Here:                     megatron-fspo serve --model runs/make-sum-32/checkpoint
On four GPUs, two each:   megatron-fspo serve --model Qwen3-8B --gpus 4-7 --gpus-per-server 2
More flags for vLLM:      megatron-fspo serve --model Qwen3-8B -- --max-num-seqs 512

vLLM has an environment of its own (`make .venv-vllm/.ready` makes one for a CPU). A server that crashed is
started again. Whoever may ask it may run code on it. So it wants a key, the environment variable VLLM_API_KEY
here and for the trainer, wherever it listens beyond the loopback address:

On another machine:       VLLM_API_KEY=$(cat key) megatron-fspo serve --model Qwen3-8B --host 10.0.0.7
"""


def add_verify(commands: command.Commands) -> None:
    """Declare ``verify``."""
    text = "check the gradient of parallel layouts on this machine"
    verify = command.add(commands, "verify", run_verify, text, _VERIFY_HELP, keys=True)
    which = verify.add_mutually_exclusive_group()
    which.add_argument("--layouts", nargs="+", metavar="LAYOUT", help="such as tp2.pp2.cp2; dp is the rest")
    which.add_argument("--all", action="store_true", help="every layout that fits the ranks (the default)")
    command.add_config(verify, "a run: its layout, loss and small model")
    verify.add_argument(
        "--dtype",
        nargs="+",
        choices=["float32", "float64", "bfloat16"],
        help="default: float32 and float64; with Transformer Engine bfloat16",
    )
    verify.add_argument("--json", type=Path, metavar="FILE", help="write every case")
    command.add_nproc(verify)


def run_verify(args: argparse.Namespace, overrides: list[str]) -> int:
    """Compare layouts; the exit status is 1 if a case fails."""
    config = load_config(args.config, overrides) if args.config else None
    ranks = command.world_size(args)
    import_megatron()

    from megatron_fspo.verify.command import plan, run

    if args.json and not os.access(args.json.absolute().parent, os.W_OK):
        raise InputError(
            f"--json {args.json}: {args.json.absolute().parent} is no folder that can be written"
        )
    planned = plan(config, args.layouts, args.dtype, use_all=args.all, world_size=ranks)
    command.start_ranks(args)

    from megatron_fspo.mcore.startup import job

    with job():
        passed = run(planned, config, args.json)
    return 0 if passed else 1


def add_data(commands: command.Commands) -> None:
    """Declare ``data check``."""
    data = commands.add_parser("data", help="look into data files")
    actions = data.add_subparsers(dest="action", required=True)
    text = "counts, duplicates, lengths, what is wrong"
    check = command.add(actions, "check", run_data_check, text, _DATA_HELP)
    flag = check.add_argument
    flag("files", type=Path, nargs="*", metavar="FILE", help="jsonl or parquet")
    flag("--preset", choices=get_args(PresetName), help="the format of the files")
    flag("--tokenizer", type=Path, metavar="DIR", help="a checkpoint: lengths in tokens, its chat template")
    command.add_config(check, "a run: its [data] and tokenizer, and its files if no FILE is given")
    command.add_json(check)


def run_data_check(args: argparse.Namespace, _: list[str]) -> int:
    """Describe data files; the exit status is 1 if a run would refuse one."""
    from megatron_fspo.data.check import examine
    from megatron_fspo.data.tasks import source_of
    from megatron_fspo.data.tokenizer import load_tokenizer
    from megatron_fspo.environments.text import frame
    from megatron_fspo.lab.data_check import as_json, describe

    config = load_config(args.config) if args.config else None
    if config is None and not args.files:
        raise InputError("data check: name a file, or a run with --config")
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
        print(f"\nenvironment: answers stand between {before!r} and {after!r}, behind what the policy wrote")
    return 0 if all(one.fine for one in findings) else 1


def add_serve(commands: command.Commands) -> None:
    """Declare ``serve``."""
    text = "run vLLM for the rollouts of a training run"
    serve = command.add(commands, "serve", run_serve, text, _SERVE_HELP)
    flag = serve.add_argument
    flag("--model", type=Path, required=True, metavar="DIR", help="Hugging Face checkpoint")
    flag("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    flag("--port", type=int, default=8000, help="(default: %(default)s)")
    flag(
        "--backend",
        choices=["gloo", "disk", "nccl"],
        default="gloo",
        help="how weights come (default: %(default)s)",
    )
    flag("--gpus", metavar="LIST", help="such as 0-7: a server on each, from --port on")
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
        help="share the GPUs with a trainer that has vllm.colocated = true",
    )
    flag("--routes", action="store_true", help="return the experts of every token (moe.replay = rollout)")
    flag(
        "--lora-rank", type=int, default=0, metavar="N", help="serve adapters of up to this rank (lora.rank)"
    )
    flag("--announce", type=Path, metavar="DIR", help="shared folder where vllm.discovery finds the server")
    flag("--dtype", default="auto", help="of weights and activations (default: the model's)")
    flag("--log", type=Path, metavar="FILE", help="(default: runs/vllm-PORT.log)")
    flag("--vllm", metavar="PATH", help="vLLM's program (default: $VLLM_BIN, or vllm on PATH)")
    flag("--keep-alive", action="store_true", help="stay when what started this ends")
    flag(
        "--anyone-may-run-code",
        action="store_true",
        help="listen beyond the loopback address without a key: whoever reaches the port runs code here",
    )
    flag("extra", nargs="*", metavar="-- FLAGS", help="more flags of vllm serve")


def run_serve(args: argparse.Namespace, _: list[str]) -> int:
    """Run servers until they are to end."""
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
    """Declare ``status``."""
    text = "what a run does, and which of its ranks are silent"
    description = (
        "What the job of a run does, rank by rank, from its folder. Exit status 1: a rank is silent, or the "
        "job is gone; 2: there is no such run."
    )
    status = command.add(commands, "status", run_status, text, description)
    status.add_argument("folder", type=Path, help="the run's folder, such as runs/demo")
    command.add_json(status)


def run_status(args: argparse.Namespace, _: list[str]) -> int:
    """Print what a run does; the exit status is 1 if anything is wrong with it."""
    from megatron_fspo.lab.status import examine, render

    run = examine(args.folder)
    print(json.dumps(run.as_json()) if args.json else render(run))
    return 1 if run.problems else 0


def add_doctor(commands: command.Commands) -> None:
    """Declare ``doctor``."""
    text = "what is installed, what will be used, what is missing"
    doctor = command.add(commands, "doctor", run_doctor, text)
    doctor.add_argument(
        "trainer", nargs="?", choices=["verl"], help="whether this trainer, as installed here, has found FSPO"
    )
    command.add_config(doctor, "a run: which attention its shapes get")
    command.add_json(doctor)


def run_doctor(args: argparse.Namespace, _: list[str]) -> int:
    """Print what is installed; with a trainer the exit status is 1 if FSPO is not registered there."""
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
