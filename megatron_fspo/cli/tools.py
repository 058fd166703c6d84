"""The commands serve, status and doctor, which start without torch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from megatron_fspo.cli.command import JSON, argument, command, config_files
from megatron_fspo.errors import InputError


@command(
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
    argument("trainer", "check that FSPO is registered in this trainer", nargs="?", choices=["verl"]),
    config_files("configuration (TOML): show the attention backend for its shapes"),
    argument("--quick", "list packages only, without torch: GPUs and what they need are not looked for"),
    JSON,
)
def doctor(args: argparse.Namespace, _: list[str]) -> int:
    """Print what is installed; with a trainer, exit with status 1 if FSPO is not registered in it."""
    from megatron_fspo.cli.doctor import examine, installed, render, verl_problem

    if args.trainer is not None:
        why = verl_problem()
        said = "verl has the policy loss fspo" if why is None else f"verl has no policy loss fspo: {why}"
        findings: dict[str, Any] = {"trainer": "verl", "registered": why is None, "problem": why}
        print(json.dumps(findings) if args.json else said)
        return 0 if why is None else 1
    config = None
    if args.config and not args.quick:
        from megatron_fspo.config.loading import load_config

        config = load_config(args.config, [])
    findings = installed() if args.quick else examine(config)
    print(json.dumps(findings) if args.json else render(findings))
    return 0
