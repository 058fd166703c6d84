"""What each command does. Imports that take seconds wait until its arguments are known to be right."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_fspo.config.data import Data, DataSet
from megatron_fspo.config.loading import load_config
from megatron_fspo.console import each_line, import_megatron
from megatron_fspo.doctor import absent, what_is_required
from megatron_fspo.errors import InputError, TrainingError

SHUTDOWN_SECONDS = "1800"
"""From SIGTERM to the kill, unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT says otherwise."""


def train(args: argparse.Namespace, overrides: list[str]) -> int:
    if args.check:
        return each_line(lambda: _check(args, overrides), "megatron-fspo")
    config = load_config(args.config, overrides)  # before the imports that take seconds
    import_megatron()

    from megatron_fspo.job.folder import check_writable, checkpoints_to_resume
    from megatron_fspo.mcore.startup import job
    from megatron_fspo.trainer.prepare import prepare

    with job():
        inputs = prepare(config, world_size=_world_size(args))
        checkpoints_to_resume(config, args.resume)
        check_writable(config.run_folder)
        _start_ranks(args, args.argv)

        from megatron_fspo.trainer.loop import train

        pages = not absent("lab")
        finished = train(inputs, resume=args.resume, draw=_draw if pages else None)
        if finished and os.environ.get("RANK", "0") == "0":
            folder = inputs.config.run_folder
            print(_where(folder, _report_of(folder) if pages else what_is_required("matplotlib")))
    return 0 if finished else 143


def _report_of(folder: Path) -> Path:
    from megatron_fspo.lab.report.page import write_report

    try:
        return write_report(folder)
    except OSError as error:
        raise TrainingError(
            f"{error.filename or folder}: the report cannot be written: {error.strerror}. The run is done; "
            f"`megatron-fspo report {folder}` writes it"
        ) from None


def _draw(folder: Path) -> Mapping[str, str]:
    """Pictures of a run under way; where they are wanted only, matplotlib is imported."""
    from megatron_fspo.lab.report.page import fairness_pictures

    return fairness_pictures(folder)


def _check(args: argparse.Namespace, overrides: list[str]) -> int:
    config = load_config(args.config, overrides)
    import_megatron()

    from megatron_fspo.trainer.check import check_run

    # Under torchrun, and in the launch script, the run will be on this machine.
    here = "WORLD_SIZE" in os.environ
    notes = check_run(config, world_size=_world_size(args), resume=args.resume, here=here)
    print(f"{' + '.join(map(str, args.config))}: fine; the run would be in {config.run_folder}")
    for note in notes:
        print(f"note: {note}")
    return 0


def evaluate(args: argparse.Namespace, overrides: list[str]) -> int:
    from megatron_fspo.cli.evaluation import config_of

    config = config_of(args, overrides)
    import_megatron()

    from megatron_fspo.mcore.startup import job
    from megatron_fspo.trainer.evaluate_checkpoint import evaluate_checkpoint
    from megatron_fspo.trainer.prepare import prepare

    with job():
        inputs = prepare(config, world_size=_world_size(args), trains=False)
        if not inputs.validation:
            raise InputError("evaluate needs data.validation")
        _start_ranks(args, args.argv)

        metrics = evaluate_checkpoint(inputs, out=args.out, other=args.compare)
    if os.environ.get("RANK", "0") == "0":
        if args.json:
            print(json.dumps({name: None if math.isnan(v) else v for name, v in metrics.items()}))
        elif args.out is not None:
            print((args.out / "table.md").read_text(encoding="utf-8"), end="")
        else:
            print("\n".join(f"{name}  {value:.4f}" for name, value in metrics.items()))
    return 0


def verify(args: argparse.Namespace, overrides: list[str]) -> int:
    config = load_config(args.config, overrides) if args.config else None
    world_size = _world_size(args)
    import_megatron()

    from megatron_fspo.verify.command import plan, run

    if args.json and not os.access(args.json.absolute().parent, os.W_OK):
        raise InputError(
            f"--json {args.json}: {args.json.absolute().parent} is no folder that can be written"
        )
    planned = plan(config, args.layouts, args.dtype, use_all=args.all, world_size=world_size)
    _start_ranks(args, args.argv)

    from megatron_fspo.mcore.startup import job

    with job():
        passed = run(planned, config, args.json)
    return 0 if passed else 1


def calibrate(args: argparse.Namespace, overrides: list[str]) -> int:
    config = load_config(args.config, overrides)
    import_megatron()

    from megatron_fspo.job.folder import check_writable
    from megatron_fspo.lab.calibrate.command import check, report, run
    from megatron_fspo.mcore.startup import job

    with job():
        inputs = check(config, args.emulate, args.responses, world_size=_world_size(args))
        check_writable(inputs.config.run_folder)
        _start_ranks(args, args.argv)
        found = run(inputs, args.emulate, args.responses)
    if found is not None:
        print(found.model_dump_json() if args.json else report(found, inputs))
    return 0


def serve(args: argparse.Namespace, _: list[str]) -> int:
    from megatron_fspo.serve import ServerOptions, gpu_numbers, place, supervise_all

    options = ServerOptions(
        model=args.model,
        host=args.host,
        port=args.port,
        backend=args.backend,
        dtype=args.dtype,
        log=args.log,
        program=args.vllm,
        extra=tuple(args.extra),
        colocated=args.colocated,
        announce=args.announce,
        anyone_may_run_code=args.anyone_may_run_code,
    )
    servers = place(options, gpu_numbers(args.gpus), args.gpus_per_server) if args.gpus else [options]
    return supervise_all(servers, keep_alive=args.keep_alive)


def check_data(args: argparse.Namespace, _: list[str]) -> int:
    from megatron_fspo.data.check import as_json, describe, examine
    from megatron_fspo.data.tasks import source_of
    from megatron_fspo.data.tokenizer import load_tokenizer

    config = load_config(args.config) if args.config else None
    if config is None and not args.files:
        raise InputError("data check: name a file, or a run with --config")
    data = config.data if config else Data(train=Path())
    data = data.model_copy(update={"preset": args.preset} if args.preset else {})
    sets = [DataSet(file=file) for file in args.files] or [*data.train_sets, *data.validation_sets]
    folder = args.tokenizer or (config.model.checkpoint if config else None)
    tokenizer = load_tokenizer(folder) if folder else None
    found = [examine(source_of(data, one), tokenizer, data.max_prompt_tokens) for one in sets]
    if config and not args.files:
        samples = config.evaluation_samples.values()
        for one, number in zip(found[len(data.train_sets) :], samples, strict=True):
            one.samples = number
    print(json.dumps([as_json(one) for one in found]) if args.json else "\n\n".join(map(describe, found)))
    return 0 if all(one.fine for one in found) else 1


def report(args: argparse.Namespace, _: list[str]) -> int:
    runs = [*([args.folder] if args.folder else []), *args.compare]
    if args.out is not None and not args.compare:
        raise InputError("report --out: only with --compare; the report of one run is in its folder")
    if not runs:
        raise InputError("report: name the folder of a run, such as runs/demo")
    if args.compare:
        from megatron_fspo.lab.report.compare import write_comparison

        print(write_comparison(runs, args.out))
    else:
        from megatron_fspo.lab.report.page import write_report

        print(write_report(args.folder))
    return 0


def status(args: argparse.Namespace, _: list[str]) -> int:
    from megatron_fspo.record.status import examine, render

    found = examine(args.folder)
    print(json.dumps(found.as_json()) if args.json else render(found))
    return 1 if found.problems else 0


def doctor(args: argparse.Namespace, _: list[str]) -> int:
    if args.trainer is not None:
        return _doctor_verl(args)
    from megatron_fspo.doctor import examine, render

    findings = examine(load_config(args.config, []) if args.config else None)
    print(json.dumps(findings) if args.json else render(findings))
    return 0


def _doctor_verl(args: argparse.Namespace) -> int:
    from megatron_fspo.adapters.registered import verl_problem

    why = verl_problem()
    said = "verl has the policy loss fspo" if why is None else f"verl has no policy loss fspo: {why}"
    print(json.dumps({"trainer": "verl", "registered": why is None, "problem": why}) if args.json else said)
    return 0 if why is None else 1


def _world_size(args: argparse.Namespace) -> int:
    """Processes of the job: torchrun's, or those that --nproc is about to start."""
    if "WORLD_SIZE" in os.environ:
        if not os.environ["WORLD_SIZE"].isdecimal():
            raise InputError(f"WORLD_SIZE = {os.environ['WORLD_SIZE']!r}: not a number of processes")
        return int(os.environ["WORLD_SIZE"])
    if args.nproc < 1:
        raise InputError(f"--nproc {args.nproc}: must be at least 1")
    return int(args.nproc)


def _start_ranks(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """With --nproc, become torchrun with the same command line; it starts this program again per rank."""
    if args.nproc == 1 or "WORLD_SIZE" in os.environ:
        return
    # torchrun would set the same and warn about it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.stdout.flush()
    launcher = ["-m", "megatron_fspo.cli.launch", "--standalone", "--nproc-per-node", str(args.nproc)]
    # After SIGTERM torchrun kills ranks that are still there; by its own default after 30 s, in mid-step.
    launcher += ["--shutdown-timeout", os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_SECONDS)]
    os.execv(sys.executable, [sys.executable, *launcher, "-m", "megatron_fspo", *_without_nproc(argv)])


def _without_nproc(argv: Sequence[str]) -> list[str]:
    """torchrun would take the word for an abbreviation of its own."""
    words = list(argv)
    if "--nproc" in words:
        at = words.index("--nproc")
        del words[at : at + 2]
    return [word for word in words if not word.startswith("--nproc=")]


def _where(folder: Path, report: Path | str) -> str:
    return (
        f"\ndone. The run is in {folder}/\n"
        f"  checkpoint for transformers   {folder / 'hf'}\n"
        f"  report                        {report}\n"
        f"  numbers                       {folder / 'metrics.jsonl'}\n"
        f"  resume from                   {folder / 'checkpoints'}"
    )
