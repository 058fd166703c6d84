"""The command ``train``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from megatron_fspo.cli.command import NPROC, argument, command, config_files, start_ranks, world_size
from megatron_fspo.cli.console import import_megatron, say
from megatron_fspo.cli.doctor import absent, missing_package
from megatron_fspo.config.loading import UNIONS, legal_keys, load_config, variants_of
from megatron_fspo.errors import InputErrors, TrainingError

_COMMON = (
    "model.checkpoint data.train data.validation reward.name run.name run.steps optimizer.lr rollout.engine "
    "rollout.prompts rollout.samples rollout.max_response_tokens batch.max_tokens parallel.tensor log.wandb"
).split()


def describe_keys() -> str:
    """Return the reference of all keys for ``--help``, a line per key: common ones, then sections."""
    lines: dict[str, list[str]] = {"common keys": []}
    for key, field, variant in legal_keys():
        word = str(field.default)
        word = "none" if field.default is None else word.lower() if isinstance(field.default, bool) else word
        default = "required" if field.is_required() else f"default {word}"
        text = field.description or ""
        section, _, name = key.partition(".")
        if name == "name" and section in UNIONS:
            *first, last = variants_of(section)
            text = f"{', '.join(first)} or {last}"
        owner = f" [{variant}]" if variant else ""
        own = lines["common keys"] if key in _COMMON else lines.setdefault(f"[{section}]", [])
        own.append(f"  --{key.replace('_', '-'):<32} {text}{owner} ({default})")
    return "\n\n".join("\n".join([f"{heading}:", *own]) for heading, own in lines.items())


@command(
    config_files(required=True),
    NPROC,
    argument(
        "--resume auto",
        "continue the run from its newest checkpoint; auto: from the newest complete one, or start if there "
        "is none (for schedulers that requeue jobs)",
        default="no",
        nargs="?",
        choices=["newest", "auto"],
        const="newest",
    ),
    argument("--check", "report all errors in the input, and exit"),
    keys=True,
    epilog=describe_keys(),
)
def train(args: argparse.Namespace, overrides: list[str]) -> int:
    """Train a policy with FSPO (or RLOO, GSPO, GRPO, DAPO, CISPO), from a Hugging Face checkpoint.

    One node, 2 processes:    megatron-fspo train --config examples/make_sum/run.toml --nproc 2
    Under torchrun:           torchrun --nproc-per-node 8 -m megatron_fspo train --config run.toml
    Change a key:             ... --loss.c-high 0.04 --run.name wider
    Layer two files:          ... --config run.toml --config wider.toml
    Check without training:   megatron-fspo train --config run.toml --check
    Continue a stopped run:   megatron-fspo train --config run.toml --resume
    Continue or start:        megatron-fspo train --config run.toml --resume auto

    Writes runs/<run.name>/: config.toml, metrics.jsonl, checkpoints/, hf/ and report/index.html. Exit status
    143: SIGTERM stopped the run.
    """
    if args.check:
        try:
            return _check(args, overrides)
        except InputErrors as errors:
            for problem in errors.problems:
                say(f"megatron-fspo: {problem}")
            return 2
    config = load_config(args.config, overrides)  # before slow imports
    if "WORLD_SIZE" not in os.environ:
        say(f"checking {config.model.checkpoint} and the data", error=False)
    import_megatron()

    from megatron_fspo.job.hang import record_collectives
    from megatron_fspo.job.resume import check_writable, checkpoints_to_resume
    from megatron_fspo.mcore.machine.startup import job
    from megatron_fspo.trainer.prepare import prepare

    with job():
        inputs = prepare(config, world_size=world_size(args))
        checkpoints_to_resume(config, args.resume)
        check_writable(config.run_folder)
        start_ranks(args)
        if inputs.backend.collectives == "nccl":
            record_collectives(config.run_folder / "hang")

        say("loading the model; the first step follows", error=False)
        from megatron_fspo.trainer.loop import train

        pages = not absent("lab")
        finished = train(inputs, resume=args.resume, draw=_draw if pages else None)
        if finished and os.environ.get("RANK", "0") == "0":
            folder = inputs.config.run_folder
            report = _write_report(folder) if pages else missing_package("jinja2")
            print(
                f"\ndone. The run is in {folder}/\n"
                f"  checkpoint for transformers   {folder / 'hf'}\n"
                f"  report                        {report}\n"
                f"  numbers                       {folder / 'metrics.jsonl'}\n"
                f"  resume from                   {folder / 'checkpoints'}"
            )
    return 0 if finished else 143


def _write_report(folder: Path) -> Path:
    from megatron_fspo.lab.report.page import write_report

    try:
        return write_report(folder)
    except OSError as error:
        raise TrainingError(
            f"{error.filename or folder}: the report cannot be written: {error.strerror}. The run is done; "
            f"`megatron-fspo report {folder}` writes the report"
        ) from None


def _draw(folder: Path) -> Mapping[str, str]:
    """Draw the plots of a run in progress. Imports what draws only when called."""
    from megatron_fspo.lab.report.page import fairness_pictures

    return fairness_pictures(folder)


def _check(args: argparse.Namespace, overrides: list[str]) -> int:
    config = load_config(args.config, overrides)
    import_megatron()

    from megatron_fspo.trainer.prepare import check_run

    # Under torchrun, and in the launch script, the run itself starts on this machine.
    here = "WORLD_SIZE" in os.environ
    notes = check_run(config, world_size=world_size(args), resume=args.resume, here=here)
    print(f"{' + '.join(map(str, args.config))}: fine; the run would be in {config.run_folder}")
    for note in notes:
        print(f"note: {note}")
    return 0
