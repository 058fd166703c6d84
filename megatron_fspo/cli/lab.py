"""The commands of the lab: plan, calibrate, explain, sweep, report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron_fspo.cli import command
from megatron_fspo.cli.console import import_megatron
from megatron_fspo.config.loading import load_config
from megatron_fspo.errors import InputError

_PLAN_HELP = """\
Say what a run takes before it is started: memory by pipeline stage, checkpoints, an estimate of its time.

A run on a node:          megatron-fspo plan --config examples/qwen3_8b/run.toml --model qwen3-8b --nproc 8
Another layout:           ... --parallel.pipeline 2 --model.recompute full
A large model on paper:   ... --model qwen3-235b-a22b --nproc 256 --parallel.tensor 4 --parallel.expert 32
Other assumptions:        ... --assume flops=1979e12 flops_share=0.35 network=100e9
One rank's step, run:     ... --nproc 64 --trace 37

Needs no GPU, no checkpoint and no job. Parameters, gradients, optimizer and checkpoint are exact, activations
are counted tensor by tensor, times are estimates with the assumptions they rest on. Exit status 1: it does
not fit; then single changes that would are named. With --trace the trainer's own code takes the step of one
rank on GPUs that are not there: memory by line, arithmetic, messages, host syncs (docs/without_a_gpu.md).
"""

_CALIBRATE_HELP = """\
Measure how much of S is noise, before a run: its own passes over the same responses, compared.

The run's machine:        torchrun --nproc-per-node 8 -m megatron_fspo calibrate --config run.toml
More responses:           ... --rollout.prompts 64
FP8 without such a GPU:   megatron-fspo calibrate --config run.toml --emulate blockwise mxfp8
Given responses:          ... --responses runs/demo/samples.jsonl

It samples one rollout and takes the optimizer steps of it, then throws the weights away. A table is printed;
runs/<run.name>.calibrate/ has it as a page, and calibration.json for the key loss.noise.
"""

_EXPLAIN_HELP = """\
Say what each loss makes of the same responses: what it clips, how evenly over length, what noise would.

A dump of any trainer:    megatron-fspo explain dump.jsonl
Your limits:              megatron-fspo explain dump.parquet --fspo.c-high 0.04 --gspo.eps-low 2e-4
One step of our run:      megatron-fspo explain runs/demo --step 10 --fspo.c-low 0.05 --fspo.c-high 0.05
At a rate of 10%:         ... --rate 0.1 --out runs/explained
Other names of fields:    ... --fields log_ratio_sum=summed_kl advantage=adv

A row has the response length L, S or the token log-probs of both policies, and the advantage A. Limits
are those of the losses' sections in docs/config.md. docs/explain.md says more, also of TRL and verl.
"""

_SWEEP_HELP = """\
Make several runs from one file, arms x seeds, and say what came of them, with intervals over seeds.

All of it:                megatron-fspo sweep sweep.toml
Four runs at a time:      megatron-fspo sweep sweep.toml --jobs 4
Change a key of all runs: megatron-fspo sweep sweep.toml --run.steps 4

The same command goes on where a killed one stopped: runs that are there are not made again. docs/running.md
has the file. Exit status 1: runs failed; the others are made all the same.
"""

_REPORT_HELP = """\
Draw what runs left in their folders as a page: one file, which loads nothing.

A run:                    megatron-fspo report runs/demo
Several on one page:      megatron-fspo report --compare runs/fspo runs/rloo
A run in progress:        megatron-fspo report --follow runs/demo

The page of a run is its report/index.html. That of several is <first run>.compare/index.html beside the
first: the same pictures for all, intervals, and the settings in which they differ. --follow serves the page
to browsers on this machine, drawn again after each step; on a cluster forward the port with ssh -L.
"""


def add_plan(commands: command.Commands) -> None:
    """Declare ``plan``."""
    plan = command.add(commands, "plan", run_plan, "memory and time of a run on paper", _PLAN_HELP, keys=True)
    command.add_config(plan, required=True)
    flag = plan.add_argument
    flag("--nproc", type=int, default=1, metavar="N", help="ranks that train (default 1)")
    flag(
        "--model",
        metavar="NAME",
        help="in place of model.checkpoint: a published shape, such as qwen3-32b, or a config.json",
    )
    flag("--gpu-memory", type=float, default=80, metavar="GIB", help="of a GPU (default 80)")
    flag(
        "--reserve",
        type=float,
        default=6,
        metavar="GIB",
        help="of it, for CUDA, NCCL and fragments (default 6)",
    )
    flag("--mean-prompt", type=float, metavar="N", help="tokens (default: half of the longest prompt)")
    flag("--mean-response", type=float, metavar="N", help="tokens (default: half of the longest response)")
    flag("--servers", type=int, metavar="N", help="vLLM servers (default: as many as vllm.urls names)")
    flag("--server-gpus", type=int, metavar="N", help="of one vLLM server (default: as needed)")
    flag(
        "--server-share",
        type=float,
        default=0.9,
        metavar="X",
        help="of a server's GPU that vLLM takes: its --gpu-memory-utilization (default 0.9)",
    )
    flag(
        "--assume", nargs="+", default=[], metavar="NAME=NUMBER", help="speeds; --assume ? lists their names"
    )
    flag("--trace", type=int, metavar="RANK", help="take the step of this rank, without a GPU")
    command.add_json(plan)


def run_plan(args: argparse.Namespace, overrides: list[str]) -> int:
    """Print what the run takes; the exit status is 1 if it does not fit."""
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

    names = ("mean_prompt", "mean_response", "servers", "server_gpus", "server_share")
    given = Given(
        world=args.nproc,
        gpu_gib=args.gpu_memory,
        reserve_gib=args.reserve,
        machine=assumed(args.assume),
        **{name: getattr(args, name) for name in names},
    )
    if args.trace is not None:
        from megatron_fspo.lab.trace.command import trace

        print(trace(config, given, model=args.model, rank=args.trace, use_json=args.json))
        return 0
    text, fits = plan(config, given, model=args.model, use_json=args.json)
    print(text)
    return 0 if fits else 1


def add_calibrate(commands: command.Commands) -> None:
    """Declare ``calibrate``."""
    text = "measure how much of S is noise"
    calibrate = command.add(commands, "calibrate", run_calibrate, text, _CALIBRATE_HELP, keys=True)
    command.add_config(calibrate, required=True)
    command.add_nproc(calibrate)
    calibrate.add_argument(
        "--emulate",
        nargs="+",
        default=[],
        choices=["blockwise", "mxfp8", "tensorwise"],
        help="FP8 recipes to imitate with the run's own layers",
    )
    calibrate.add_argument(
        "--responses",
        type=Path,
        metavar="FILE",
        help="score these (JSON lines with prompt_token_ids and token_ids); samples nothing, trains nothing",
    )
    command.add_json(calibrate)


def run_calibrate(args: argparse.Namespace, overrides: list[str]) -> int:
    """Measure the noise of S in a run, and print it."""
    config = load_config(args.config, overrides)
    import_megatron()

    from megatron_fspo.job.folder import check_writable
    from megatron_fspo.lab.calibrate.command import check, report, run
    from megatron_fspo.mcore.startup import job

    with job():
        inputs = check(config, args.emulate, args.responses, world_size=command.world_size(args))
        check_writable(inputs.config.run_folder)
        command.start_ranks(args)
        noise = run(inputs, args.emulate, args.responses)
    if noise is not None:
        print(noise.model_dump_json() if args.json else report(noise, inputs))
    return 0


def add_explain(commands: command.Commands) -> None:
    """Declare ``explain``."""
    text = "which loss clips which responses of a dump"
    explain = command.add(commands, "explain", run_explain, text, _EXPLAIN_HELP, keys=True)
    flag = explain.add_argument
    flag("file", type=Path, help="jsonl or parquet of any trainer, or the folder of our run")
    flag("--step", type=int, metavar="N", help="only rows of this step (default: all)")
    flag(
        "--rate",
        type=float,
        metavar="X",
        help="share outside at which losses are compared (default: that of FSPO with its limits)",
    )
    flag("--fields", nargs="+", default=[], metavar="FIELD=NAME", help="names of fields in the file")
    flag("--out", type=Path, metavar="DIR", help="write a page, the figures, and the fate of every response")
    command.add_json(explain)


def run_explain(args: argparse.Namespace, limits: list[str]) -> int:
    """Print what each loss makes of the responses."""
    from megatron_fspo.lab.explain.command import explain, write
    from megatron_fspo.lab.explain.text import as_json, render

    findings = explain(args.file, limits, args.fields, step=args.step, rate=args.rate)
    written = write(findings, args.out) if args.out is not None else ""
    print(json.dumps(as_json(findings)) if args.json else render(findings))
    if written and not args.json:
        print(written)
    return 0


def add_sweep(commands: command.Commands) -> None:
    """Declare ``sweep``."""
    text = "several runs from one file, compared"
    sweep = command.add(commands, "sweep", run_sweep, text, _SWEEP_HELP, keys=True)
    sweep.add_argument("file", type=Path, help="TOML: config, folder, seeds, arms")
    sweep.add_argument("--jobs", type=_count, metavar="N", help="runs at a time (default: the file's)")


def run_sweep(args: argparse.Namespace, overrides: list[str]) -> int:
    """Make the runs and print their summary."""
    from megatron_fspo.lab.sweep.file import read_sweep
    from megatron_fspo.lab.sweep.processes import make
    from megatron_fspo.lab.sweep.summary import as_json, summarize, table

    sweep = read_sweep(args.file)
    words = {"words": (*sweep.words, *overrides)}
    sweep = sweep.model_copy(update=words if args.jobs is None else {**words, "jobs": args.jobs})
    make(sweep, lambda line: print(line, flush=True))
    summary = summarize(sweep)
    path = sweep.folder / "summary.json"
    path.write_text(as_json(summary), encoding="utf-8")
    print(f"\n{table(summary, sweep.match)}\n\n{path}")
    return 0


def _count(word: str) -> int:
    count = int(word)
    if count < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return count


def add_report(commands: command.Commands) -> None:
    """Declare ``report``."""
    text = "draw runs as a page: one, or several compared"
    report = command.add(commands, "report", run_report, text, _REPORT_HELP)
    flag = report.add_argument
    flag("folder", type=Path, nargs="?", help="the run's folder, such as runs/demo")
    flag("--compare", type=Path, nargs="+", default=[], metavar="RUN", help="runs, on one page")
    flag(
        "--out",
        type=Path,
        metavar="PATH",
        help="with --compare: a folder for index.html, or a file that ends in .html",
    )
    flag("--follow", action="store_true", help="serve the page of a run in progress")
    flag("--port", type=int, metavar="N", help="with --follow (default 8050; 0: any free one)")


def run_report(args: argparse.Namespace, _: list[str]) -> int:
    """Draw one run, or several on one page."""
    runs = [*([args.folder] if args.folder else []), *args.compare]
    if args.out is not None and not args.compare:
        raise InputError("report --out: only with --compare; the report of one run is in its folder")
    if not runs:
        raise InputError("report: name the folder of a run, such as runs/demo")
    if args.follow and args.compare:
        raise InputError("report --follow: shows one run, not a comparison")
    if args.port is not None and not args.follow:
        raise InputError("report --port: only with --follow")
    if args.follow:
        from megatron_fspo.lab.report.follow import serve_report

        port = 8050 if args.port is None else args.port
        serve_report(args.folder, port, lambda line: print(line, flush=True))
    elif args.compare:
        from megatron_fspo.lab.report.compare import write_comparison

        print(write_comparison(runs, args.out))
    else:
        from megatron_fspo.lab.report.page import write_report

        print(write_report(args.folder))
    return 0
