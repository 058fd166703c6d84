"""The words of the command line, and their help."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from megatron_fspo import __version__
from megatron_fspo.cli import commands as run
from megatron_fspo.cli.explain import add_explain
from megatron_fspo.cli.plan import add_plan
from megatron_fspo.cli.sweep import add_sweep
from megatron_fspo.config.data import PresetName
from megatron_fspo.config.loading import describe_keys
from megatron_fspo.console import OneLineParser

_TRAIN_HELP = """\
Train a policy with FSPO (or RLOO, GSPO, GRPO, DAPO, CISPO) from a Hugging Face checkpoint to a better one.

One node, 2 processes:    megatron-fspo train --config examples/make_sum/run.toml --nproc 2
Under torchrun:           torchrun --nproc-per-node 8 -m megatron_fspo train --config run.toml
Change a key:             ... --loss.c-high 0.04 --run.name wider
Change some for good:     ... --config run.toml --config wider.toml
Check without training:   megatron-fspo train --config run.toml --check
Continue a stopped run:   megatron-fspo train --config run.toml --resume
Continue or start:        megatron-fspo train --config run.toml --resume auto

Results are in runs/<run.name>/: config.toml, metrics.jsonl, checkpoints/, hf/ and report/index.html.
"""

_VERIFY_HELP = """\
Compare the gradient of parallel layouts, parameter by parameter, with one process in float64.

A small Qwen3 gets the same weights and the same very uneven batch in every layout; log-probs, S, loss, clip
decisions, gradients and the number of collectives are compared, for every loss and several splits into
micro-batches. Run it on your cluster before a long job.

Here, on the CPU:         megatron-fspo verify --nproc 8 --all
A few layouts:            megatron-fspo verify --nproc 8 --layouts tp2.pp2.cp2 tp2.sp.cp2.do
Your run's layout:        torchrun --nproc-per-node 8 -m megatron_fspo verify --config run.toml
The same without GPUs:    megatron-fspo verify --nproc 8 --config run.toml --model.backend cpu

A layout is words joined by dots: tpN, sp, ppN, vppN (virtual stages), cpN, dpN, do (distributed optimizer),
overlap, recompute. Exit status 1 if a case fails; the worst parameter is named.
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

_EVALUATE_HELP = """\
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

_DATA_HELP = """\
Look into data files before a run: counts, duplicates, lengths, what is wrong, and three prompts of each.

A file of a known format:  megatron-fspo data check dapo.parquet --preset dapo
Lengths in tokens:         ... --tokenizer Qwen3-8B
The files of a run:        megatron-fspo data check --config run.toml

Exit status 1 if a run would refuse a file, or if there are answers that no verifier can read.
"""

_REPORT_HELP = """\
Draw what runs left in their folders as a page: one file, which loads nothing.

A run:                    megatron-fspo report runs/demo
Several on one page:      megatron-fspo report --compare runs/fspo runs/rloo

The page of a run is its report/index.html. That of several is <first run>.compare/index.html beside the
first: the same pictures for all, intervals, and the settings in which they differ.
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


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="megatron-fspo", description="FSPO on Megatron-Core.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    train = commands.add_parser(
        "train",
        help="train a policy",
        description=_TRAIN_HELP,
        epilog="keys of the configuration:\n" + describe_keys(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_config(train)
    train.add_argument(
        "--resume",
        nargs="?",
        choices=["newest", "auto"],
        const="newest",
        default="no",
        metavar="auto",
        help="continue the run from its newest checkpoint; auto: if there is one, from the newest that is "
        "whole, else start (for schedulers that requeue)",
    )
    train.add_argument("--check", action="store_true", help="say all that is wrong, and stop")
    train.set_defaults(run=run.train)

    add_plan(commands)
    _add_verify(commands)
    _add_calibrate(commands)

    _add_evaluate(commands)
    add_explain(commands)
    add_sweep(commands)
    _add_data(commands)
    _add_serve(commands)

    status = commands.add_parser(
        "status",
        help="what a run does, and which of its ranks are silent",
        description="What the job of a run does, rank by rank, from its folder. Exit status 1: a rank is "
        "silent, or the job is gone; 2: there is no such run.",
    )
    status.add_argument("folder", type=Path, help="the run's folder, such as runs/demo")
    status.add_argument("--json", action="store_true", help="print one JSON line")
    status.set_defaults(run=run.status)

    _add_report(commands)

    doctor = commands.add_parser("doctor", help="what is installed, what will be used, what is missing")
    doctor.add_argument(
        "trainer", nargs="?", choices=["verl"], help="whether this trainer, as installed here, has found FSPO"
    )
    _add_files(doctor, "a run: which attention its shapes get")
    doctor.add_argument("--json", action="store_true", help="print one JSON line")
    doctor.set_defaults(run=run.doctor)
    return parser


def _add_verify(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    verify = commands.add_parser(
        "verify",
        help="check the gradient of parallel layouts on this machine",
        description=_VERIFY_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    which = verify.add_mutually_exclusive_group()
    which.add_argument("--layouts", nargs="+", metavar="LAYOUT", help="such as tp2.pp2.cp2; dp is the rest")
    which.add_argument("--all", action="store_true", help="every layout that fits the ranks (the default)")
    _add_files(verify, "a run: its layout, loss and small model")
    verify.add_argument(
        "--dtype",
        nargs="+",
        choices=["float32", "float64", "bfloat16"],
        help="default: float32 and float64; with Transformer Engine bfloat16",
    )
    verify.add_argument("--json", type=Path, metavar="FILE", help="write every case")
    _add_nproc(verify)
    verify.set_defaults(run=run.verify)


def _add_calibrate(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    calibrate = commands.add_parser(
        "calibrate",
        help="measure how much of S is noise",
        description=_CALIBRATE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_config(calibrate)
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
    calibrate.add_argument("--json", action="store_true", help="print one JSON line")
    calibrate.set_defaults(run=run.calibrate)


def _add_evaluate(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    evaluate = commands.add_parser(
        "evaluate",
        help="sample and grade prompts, with intervals",
        description=_EVALUATE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_files(evaluate, "a run, as TOML, in place of the flags")
    evaluate.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint: Hugging Face, or converted to Megatron"
    )
    evaluate.add_argument("--data", type=Path, nargs="+", metavar="FILE", help="prompts, a set per file")
    evaluate.add_argument("--preset", metavar="NAME", help="how the files name their fields (data.preset)")
    evaluate.add_argument("--reward", metavar="NAME", help="the verdict on a response (reward.name)")
    evaluate.add_argument(
        "--samples",
        type=int,
        nargs="+",
        metavar="N",
        help="responses per prompt (default 16); several: one for each file of --data",
    )
    evaluate.add_argument("--temperature", type=float, metavar="T", help="0: greedy (default 1)")
    evaluate.add_argument("--top-p", type=float, metavar="P", help="(default 1)")
    evaluate.add_argument(
        "--max-response-tokens",
        type=int,
        metavar="N",
        help="longest response (default 4096, at most half of the model's context)",
    )
    evaluate.add_argument("--engine", choices=["embedded", "vllm"], help="what samples (default embedded)")
    evaluate.add_argument("--out", type=Path, metavar="DIR", help="where results go, or are gone on with")
    evaluate.add_argument("--compare", type=Path, metavar="DIR", help="another evaluation's --out")
    evaluate.add_argument("--json", action="store_true", help="print one JSON line")
    _add_nproc(evaluate)
    evaluate.set_defaults(run=run.evaluate)


def _add_data(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    data = commands.add_parser("data", help="look into data files")
    actions = data.add_subparsers(dest="action", required=True)
    check = actions.add_parser(
        "check",
        help="counts, duplicates, lengths, what is wrong",
        description=_DATA_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    check.add_argument("files", type=Path, nargs="*", metavar="FILE", help="jsonl or parquet")
    check.add_argument("--preset", choices=get_args(PresetName), help="the format of the files")
    check.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="a checkpoint: lengths in tokens, its chat template"
    )
    _add_files(check, "a run: its [data] and tokenizer, and its files if no FILE is given")
    check.add_argument("--json", action="store_true", help="print one JSON line")
    check.set_defaults(run=run.check_data)


def _add_report(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    report = commands.add_parser(
        "report",
        help="draw runs as a page: one, or several compared",
        description=_REPORT_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    report.add_argument("folder", type=Path, nargs="?", help="the run's folder, such as runs/demo")
    report.add_argument(
        "--compare", type=Path, nargs="+", default=[], metavar="RUN", help="runs, on one page"
    )
    report.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="with --compare: a folder for index.html, or a file that ends in .html",
    )
    report.set_defaults(run=run.report)


def _add_serve(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    serve = commands.add_parser(
        "serve",
        help="run vLLM for the rollouts of a training run",
        description=_SERVE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    serve.add_argument("--model", type=Path, required=True, metavar="DIR", help="Hugging Face checkpoint")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    serve.add_argument("--port", type=int, default=8000, help="(default: %(default)s)")
    serve.add_argument(
        "--backend",
        choices=["gloo", "disk", "nccl"],
        default="gloo",
        help="how weights come (default: %(default)s)",
    )
    serve.add_argument("--gpus", metavar="LIST", help="such as 0-7: a server on each, from --port on")
    serve.add_argument(
        "--gpus-per-server",
        type=int,
        default=1,
        metavar="N",
        help="tensor parallel size (default: %(default)s)",
    )
    serve.add_argument(
        "--colocated",
        action="store_true",
        help="share the GPUs with a trainer that has vllm.colocated = true",
    )
    serve.add_argument(
        "--announce", type=Path, metavar="DIR", help="shared folder where vllm.discovery finds the server"
    )
    serve.add_argument("--dtype", default="auto", help="of weights and activations (default: the model's)")
    serve.add_argument("--log", type=Path, metavar="FILE", help="(default: runs/vllm-PORT.log)")
    serve.add_argument("--vllm", metavar="PATH", help="vLLM's program (default: $VLLM_BIN, or vllm on PATH)")
    serve.add_argument("--keep-alive", action="store_true", help="stay when what started this ends")
    serve.add_argument(
        "--anyone-may-run-code",
        action="store_true",
        help="listen beyond the loopback address without a key: whoever reaches the port runs code here",
    )
    serve.add_argument("extra", nargs="*", metavar="-- FLAGS", help="more flags of vllm serve")
    serve.set_defaults(run=run.serve)


def _add_config(parser: argparse.ArgumentParser) -> None:
    _add_files(parser, "the run, as TOML", required=True)
    _add_nproc(parser)


def _add_files(parser: argparse.ArgumentParser, text: str, *, required: bool = False) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        required=required,
        metavar="FILE",
        help=f"{text}; again for files that change keys of those before",
    )


def _add_nproc(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nproc",
        type=int,
        default=1,
        metavar="N",
        help="processes to start here with torchrun (default 1)",
    )
