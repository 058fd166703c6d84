"""The commands plan, calibrate, explain, sweep and report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron_fspo.cli.command import JSON, NPROC, argument, command, config_files, start_ranks, world_size
from megatron_fspo.cli.console import import_megatron
from megatron_fspo.config.loading import load_config
from megatron_fspo.errors import InputError
from megatron_fspo.rollout.common import COLOCATED_SHARE


@command(
    config_files(required=True),
    argument("--nproc N", "number of training ranks", int, 1),
    argument("--model NAME", "model instead of model.checkpoint: a name such as qwen3-32b, or a config.json"),
    argument("--gpu-memory GIB", "memory of a GPU", float, 80),
    argument("--reserve GIB", "part of that for CUDA and fragmentation", float, 4),
    argument("--mean-prompt N", "mean prompt tokens (default: half the longest)", float),
    argument("--mean-response N", "mean response tokens (default: half the longest)", float),
    argument("--servers N", "number of vLLM servers (default: as in vllm.urls)", int),
    argument("--server-gpus N", "GPUs per vLLM server (default: as needed)", int),
    argument(
        "--server-share X",
        "part of a GPU for vLLM, its --gpu-memory-utilization (default: 0.9; colocated: 0.8)",
        float,
    ),
    argument("--assume NAME=NUMBER", "speeds; --assume ? lists the names", default=[], nargs="+"),
    argument("--trace RANK", "trace the step of this rank on simulated GPUs; all: compare all ranks"),
    JSON,
    keys=True,
)
def plan(args: argparse.Namespace, overrides: list[str]) -> int:
    """Estimate memory per pipeline stage, checkpoint sizes and time of a run before you start it.

    A run on one node:        megatron-fspo plan --config run.toml --model qwen3-8b --nproc 8
    Another layout:           ... --parallel.pipeline 2 --model.recompute full
    A large model on paper:   ... --model qwen3-235b-a22b --nproc 256 --parallel.tensor 4 --parallel.expert 32
    Other assumptions:        ... --assume flops=1979e12 flops_share=0.35 network=100e9
    Trace the step of a rank: ... --nproc 64 --trace 37
    Compare all ranks:        ... --nproc 64 --trace all

    Needs no GPU and no checkpoint. Sizes of parameters, gradients, optimizer and checkpoint are exact,
    activations are counted tensor by tensor, and times are estimates, printed with their assumptions. Exit
    status 1: the run does not fit; single changes that make it fit are listed. --trace executes one rank's
    training step on simulated GPUs, and reports memory by line, FLOPs, messages and host syncs; --trace all
    compares what the ranks of a small job of the same kind tell NCCL (docs/without_a_gpu.md).
    """
    config = load_config(args.config, overrides)
    for name in ("nproc", "gpu_memory", "mean_prompt", "mean_response", "servers", "server_gpus"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise InputError(f"--{name.replace('_', '-')} {value:g}: must be a positive number")
    default = COLOCATED_SHARE if config.vllm.colocated else 0.9
    share = default if args.server_share is None else args.server_share
    if not 0 < share <= 1:
        raise InputError(f"--server-share {share:g}: must be above 0 and at most 1")
    if not 0 <= args.reserve < args.gpu_memory:
        raise InputError(f"--reserve {args.reserve:g}: must be less than --gpu-memory {args.gpu_memory:g}")

    from megatron_fspo.lab.plan.command import assumed, plan
    from megatron_fspo.lab.plan.plan import Given

    names = ("mean_prompt", "mean_response", "servers", "server_gpus")
    given = Given(
        world=args.nproc,
        gpu_gib=args.gpu_memory,
        reserve_gib=args.reserve,
        server_share=share,
        machine=assumed(args.assume),
        **{name: getattr(args, name) for name in names},
    )
    how = {"model": args.model, "use_json": args.json}
    if args.trace is not None:
        from megatron_fspo.lab.trace.command import trace

        if args.trace != "all" and not args.trace.removeprefix("-").isdecimal():
            raise InputError(f"--trace {args.trace!r}: must be the number of a rank, or all")
        rank = args.trace if args.trace == "all" else int(args.trace)
        text, fits = trace(config, given, rank=rank, **how)
    else:
        text, fits = plan(config, given, **how)
    print(text)
    return 0 if fits else 1


@command(
    config_files(required=True),
    NPROC,
    argument(
        "--emulate",
        "FP8 recipes to emulate with the run's layers",
        default=[],
        nargs="+",
        choices=["blockwise", "mxfp8", "tensorwise"],
    ),
    argument(
        "--responses FILE",
        "score these responses (jsonl with prompt_token_ids and token_ids) without sampling or training",
        Path,
    ),
    JSON,
    keys=True,
)
def calibrate(args: argparse.Namespace, overrides: list[str]) -> int:
    """Measure how much of S is noise before a run, by comparing its own passes over the same responses.

    On the run's machine:     torchrun --nproc-per-node 8 -m megatron_fspo calibrate --config run.toml
    More responses:           ... --rollout.prompts 64
    Emulate FP8:              megatron-fspo calibrate --config run.toml --emulate blockwise mxfp8
    Existing responses:       ... --responses runs/demo/samples.jsonl

    Samples one rollout, takes its optimizer steps, and discards the weights. Prints a table, and writes it to
    runs/<run.name>.calibrate/ as a page and as calibration.json for the key loss.noise.
    """
    config = load_config(args.config, overrides)
    import_megatron()

    from megatron_fspo.job.resume import check_writable
    from megatron_fspo.lab.calibrate.command import check, report, run
    from megatron_fspo.mcore.machine.startup import job

    with job():
        inputs = check(config, args.emulate, args.responses, world_size=world_size(args))
        check_writable(inputs.config.run_folder)
        start_ranks(args)
        noise = run(inputs, args.emulate, args.responses)
    if noise is not None:
        print(noise.model_dump_json() if args.json else report(noise, inputs))
    return 0


@command(
    argument("file", "jsonl or parquet file of any trainer, or the folder of a run", Path),
    argument("--step N", "use only rows of this step (default: all)", int),
    argument(
        "--rate X", "share out of band at which to compare losses (default: FSPO's at its limits)", float
    ),
    argument("--fields FIELD=NAME", "field names in the file", default=[], nargs="+"),
    argument("--out DIR", "write a page, the figures and all clip decisions there", Path),
    JSON,
    keys=True,
)
def explain(args: argparse.Namespace, limits: list[str]) -> int:
    """Compare losses on the same responses: what each clips, how evenly over length, and what noise would.

    A dump of any trainer:    megatron-fspo explain dump.jsonl
    With your limits:         megatron-fspo explain dump.parquet --fspo.c-high 0.04 --gspo.eps-low 2e-4
    One step of a run:        megatron-fspo explain runs/demo --step 10 --fspo.c-low 0.05 --fspo.c-high 0.05
    With 10% out of band:     ... --rate 0.1 --out runs/explained
    Other field names:        ... --fields log_ratio_sum=summed_kl advantage=adv

    A row needs the response length L, the advantage A, and S or the token log-probs of both policies. Limits
    are the keys of [loss] in docs/config.md. See docs/explain.md, also for dumps of TRL and verl.
    """
    from megatron_fspo.lab.explain.command import explain, write
    from megatron_fspo.lab.explain.text import as_json, render

    findings = explain(args.file, limits, args.fields, step=args.step, rate=args.rate)
    written = write(findings, args.out) if args.out is not None else ""
    print(json.dumps(as_json(findings)) if args.json else render(findings))
    if written and not args.json:
        print(written)
    return 0


def _count(word: str) -> int:
    count = int(word)
    if count < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return count


@command(
    argument("file", "sweep file (TOML): config, folder, seeds, arms", Path),
    argument("--jobs N", "concurrent runs (default: the file's)", _count),
    keys=True,
)
def sweep(args: argparse.Namespace, overrides: list[str]) -> int:
    """Run all arms x seeds of a sweep file, and print their results with intervals over seeds.

    All runs:                 megatron-fspo sweep sweep.toml
    Four runs at a time:      megatron-fspo sweep sweep.toml --jobs 4
    Change a key of all runs: megatron-fspo sweep sweep.toml --run.steps 4

    The same command continues an interrupted sweep without repeating finished runs. docs/running.md describes
    the file. Exit status 1: some runs failed; the others are still made.
    """
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


@command(
    argument("folder", "the run's folder, such as runs/demo", Path, nargs="?"),
    argument("--compare RUN", "runs to compare on one page", Path, [], nargs="+"),
    argument("--out PATH", "with --compare: folder for index.html, or a file name ending in .html", Path),
    argument("--follow", "serve the page of a run in progress"),
    argument("--port N", "with --follow: port (default 8050; 0: any free port)", int),
)
def report(args: argparse.Namespace, _: list[str]) -> int:
    """Write the report of a run, or of several compared: one self-contained HTML page.

    One run:                  megatron-fspo report runs/demo
    Several on one page:      megatron-fspo report --compare runs/fspo runs/rloo
    A run in progress:        megatron-fspo report --follow runs/demo

    The report of one run is report/index.html in its folder. A comparison is <first run>.compare/index.html
    beside the first run; it has the plots of all runs, intervals, and the settings that differ. --follow
    serves the page to browsers on this machine, updated after each step; on a cluster, forward the port with
    ssh -L.
    """
    runs = [*([args.folder] if args.folder else []), *args.compare]
    if args.out is not None and not args.compare:
        raise InputError("report: --out needs --compare; the report of one run is in its folder")
    if not runs:
        raise InputError("report: name the folder of a run, such as runs/demo")
    if args.follow and args.compare:
        raise InputError("report: --follow shows one run and excludes --compare")
    if args.port is not None and not args.follow:
        raise InputError("report: --port needs --follow")
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


@command(
    argument("folder", "the run's folder, such as runs/demo", Path),
    argument("repo NAME", "where to: a name on the Hugging Face Hub, org/name"),
    argument("--dry-run", "print the card and the files, and upload nothing"),
)
def push(args: argparse.Namespace, _: list[str]) -> int:
    """Upload the exported model of a run to the Hugging Face Hub, as a private repository, with a model card
    of its data, loss, layout, and accuracy with intervals.

    What it would send:       megatron-fspo push runs/demo my-org/my-model --dry-run

    Needs a token: `hf auth login` or HF_TOKEN.
    """
    from megatron_fspo.lab.report.card import contents, model_card, push

    if args.dry_run:
        names = contents(args.folder)
        print(model_card(args.folder), *names, sep="\n")
    else:
        print(push(args.folder, args.repo))
    return 0
