"""The arguments of ``plan``, and what it does. It imports no Megatron, asks for no GPU and starts no rank."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_fspo.config.loading import load_config
from megatron_fspo.errors import InputError

_HELP = """\
Say what a run takes before it is started: memory by pipeline stage, checkpoints, an estimate of its time.

A run on a node:          megatron-fspo plan --config examples/qwen3_8b/run.toml --model qwen3-8b --nproc 8
Another layout:           ... --parallel.pipeline 2 --model.recompute full
A large model on paper:   ... --model qwen3-235b-a22b --nproc 256 --parallel.tensor 4 --parallel.expert 32
Other assumptions:        ... --assume flops=1979e12 flops_share=0.35 network=100e9

Needs no GPU, no checkpoint and no job. Parameters, gradients, optimizer and checkpoint are exact, activations
are counted tensor by tensor, times are estimates with the assumptions they rest on. Exit status 1: it does
not fit; then single changes that would are named.
"""


def add_plan(commands: argparse._SubParsersAction) -> None:
    """Give the command line this command."""
    plan = commands.add_parser(
        "plan",
        help="memory and time of a run on paper",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    plan.add_argument(
        "--config",
        type=Path,
        action="append",
        required=True,
        metavar="FILE",
        help="the run, as TOML; again for files that change keys of those before",
    )
    plan.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks that train (default 1)")
    plan.add_argument(
        "--model",
        metavar="NAME",
        help="in place of model.checkpoint: a published shape, such as qwen3-32b, or a config.json",
    )
    plan.add_argument("--gpu-memory", type=float, default=80, metavar="GIB", help="of a GPU (default 80)")
    plan.add_argument(
        "--reserve",
        type=float,
        default=6,
        metavar="GIB",
        help="of it, for CUDA, NCCL and fragments (default 6)",
    )
    plan.add_argument(
        "--mean-prompt", type=float, metavar="N", help="tokens (default: half of the longest prompt)"
    )
    plan.add_argument(
        "--mean-response", type=float, metavar="N", help="tokens (default: half of the longest response)"
    )
    plan.add_argument(
        "--servers", type=int, metavar="N", help="vLLM servers (default: as many as vllm.urls names)"
    )
    plan.add_argument("--server-gpus", type=int, metavar="N", help="of one vLLM server (default: as needed)")
    plan.add_argument(
        "--server-share",
        type=float,
        default=0.9,
        metavar="X",
        help="of a server's GPU that vLLM takes: its --gpu-memory-utilization (default 0.9)",
    )
    plan.add_argument(
        "--assume",
        nargs="+",
        default=[],
        metavar="NAME=NUMBER",
        help="speeds; --assume ? lists their names",
    )
    plan.add_argument("--json", action="store_true", help="print one JSON line")
    plan.set_defaults(run=run)


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    """0: it fits; 1: it does not."""
    config = load_config(args.config, overrides)
    for name in ("nproc", "gpu_memory", "mean_prompt", "mean_response", "servers", "server_gpus"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise InputError(f"--{name.replace('_', '-')} {value:g}: must be a positive number")
    if not 0 < args.server_share <= 1:
        raise InputError(f"--server-share {args.server_share:g}: must be above 0 and at most 1")
    if not 0 <= args.reserve < args.gpu_memory:
        raise InputError(f"--reserve {args.reserve:g}: must be less than --gpu-memory {args.gpu_memory:g}")

    from megatron_fspo.lab.plan.command import assumed, plan
    from megatron_fspo.lab.plan.plan import Given

    given = Given(
        world=args.nproc,
        gpu_gib=args.gpu_memory,
        reserve_gib=args.reserve,
        mean_prompt=args.mean_prompt,
        mean_response=args.mean_response,
        servers=args.servers,
        server_gpus=args.server_gpus,
        server_share=args.server_share,
        machine=assumed(args.assume),
    )
    text, fits = plan(config, given, model=args.model, use_json=args.json)
    print(text)
    return 0 if fits else 1
