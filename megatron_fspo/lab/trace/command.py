"""``megatron-fspo plan --trace``: the step of one rank of a run, on GPUs that are not there."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from megatron_fspo.config import Config
from megatron_fspo.errors import InputError
from megatron_fspo.lab.plan.plan import GIB, Given, make_plan
from megatron_fspo.lab.plan.presets import find_model
from megatron_fspo.lab.trace import engine
from megatron_fspo.lab.trace.record import Request, Site

_LINES = 12
_ROUNDS = 4
Ask = Callable[[Request], dict[str, Any]]


def traces(
    requests: Iterable[Request], *, blackwell: bool = False, paths: Sequence[Path] = ()
) -> Iterator[dict[str, Any]]:
    """Yield one trace for each request, asked for one by one, in one process. GPUs are of the generation
    Blackwell, which MXFP8 needs, or Hopper; ``paths`` are where modules are looked for first.

    Raises:
        InputError: there is no compiler, or torch is not a build for CUDA.
    """
    with tempfile.TemporaryDirectory() as folder, _process(Path(folder), blackwell, paths) as process:
        assert process.stdin is not None and process.stdout is not None
        for request in requests:
            line = ""
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(asdict(request)) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            if not line:
                said = (Path(folder) / "stderr").read_text(encoding="utf-8", errors="replace").strip()
                raise InputError(f"--trace: its process ended: {said.splitlines()[-1] if said else 'killed'}")
            yield json.loads(line)


@contextmanager
def _process(folder: Path, blackwell: bool, paths: Sequence[Path]) -> Iterator[subprocess.Popen[str]]:
    library = folder / "libcuda.so.1"
    _compile(library)
    environment = os.environ | {
        "LD_PRELOAD": str(library),
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *sys.path]),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TRACE_GPU_GENERATION": "10" if blackwell else "9",
    }
    with (folder / "stderr").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_fspo.lab.trace.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate(timeout=30)


def _compile(library: Path) -> None:
    """Build the CUDA runtime that has no GPU."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise InputError("--trace compiles a small C file, and there is no cc, gcc or clang")
    if torch.version.cuda is None:
        raise InputError(f"--trace needs torch built for CUDA, and this is {torch.__version__}")
    packages = Path(torch.__file__).parent.parent
    places = [packages / "triton/backends/nvidia/include", *packages.glob("nvidia/cu*/include")]
    places += [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    header = next((place for place in places if (place / "driver_types.h").exists()), None)
    if header is None:
        raise InputError("--trace needs CUDA's driver_types.h, which comes with triton: pip install triton")
    source = Path(__file__).with_name("cuda.c")
    flags = ["-w", "-O1", "-fPIC", "-shared", f"-I{header}", "-Wl,-soname,libcuda.so.1"]
    command = [compiler, *flags, "-o", str(library), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise InputError(f"--trace: {compiler} does not compile {source}: {done.stderr.splitlines()[0]}")


def trace(
    config: Config, given: Given, *, model: str | None, rank: int | str, use_json: bool
) -> tuple[str, bool]:
    """Return the text to print of the trace of a rank, beside the plan of ``given``, and True; with ``all``,
    of every rank of a small job, and whether they agree. ``model`` is a preset or a folder, by default the
    run's checkpoint.

    Raises:
        InputError: it cannot be traced here.
    """
    if isinstance(rank, int) and not 0 <= rank < given.world:
        raise InputError(f"--trace {rank}: there are ranks 0 to {given.world - 1}")
    if config.model.backend == "cpu":
        raise InputError("--trace is of GPUs, and model.backend = cpu: try --model.backend cuda")
    if config.model.layers != "local" and not engine.is_there():
        raise InputError(
            "--trace needs the Python of Transformer Engine (pip install --no-deps transformer_engine), or "
            "--model.layers local"
        )
    if config.model.layers != "local" and config.model.dtype != "bfloat16":
        raise InputError(f"--trace: layers of Transformer Engine are bfloat16, not {config.model.dtype}")
    name = model or str(config.model.checkpoint)
    plan, waiting = make_plan(config, find_model(name), given), deque[Request]()
    answers = traces(iter(waiting.popleft, None), blackwell=config.fp8.recipe == "mxfp8")

    def ask(request: Request) -> dict[str, Any]:
        waiting.append(request)
        seen = next(answers)
        if seen["error"]:
            raise InputError(f"the trace of rank {request.rank} ended: {seen['error']}")
        return seen

    if not isinstance(rank, int):
        return _compare_all(config, given.world, name, ask, use_json=use_json)
    planned = plan.stages[rank * config.parallel.pipeline // given.world]
    seen = ask(Request(config=config.model_dump(mode="json"), model=name, world=given.world, rank=rank))
    seen["planned"] = sum(planned.always.values()) + sum(planned.phases["update"].values())
    return json.dumps(seen) if use_json else as_text(seen, rank, given.world), True


def make_smallest(config: Config, model: str, world: int) -> tuple[Config, Request]:
    """Return the configuration and a request of the smallest job in which ranks have all the parts that they
    have in a run: with first, middle and last stage, and experts over as many axes."""
    p, arch = config.parallel, find_model(model)
    tensor, context, chunks = (min(size, 2) for size in (p.tensor, p.context, p.virtual_pipeline))
    # Stages in a ring send first if their number is even, so a ring stays even.
    stages = p.pipeline if p.pipeline <= 2 else 4 if p.interleaved and p.pipeline % 2 == 0 else 3
    replica, whole, stage = tensor * context, p.tensor * p.context, world // p.pipeline
    expert = min(p.expert, 2 if p.expert < whole else replica if p.expert == whole else 2 * replica)
    kinds = 1 if arch.uniform else arch.shortened().num_layers  # of layers that communicate differently
    least = max(2 if kinds == 1 else kinds * stages * chunks, 2 * config.fp8.first_last_layers_bf16 + 1)
    groups = math.lcm(expert, arch.experts.groups if arch.experts else 1)
    data = max(min(stage // whole, 2), expert * min(stage // p.expert, 2) // replica)
    tree = config.model_dump()
    tree["parallel"] |= {"tensor": tensor, "context": context, "pipeline": stages, "expert": expert}
    tree["parallel"]["virtual_pipeline"] = chunks
    tree["data"]["max_prompt_tokens"] = tree["rollout"]["max_response_tokens"] = 256
    tree["batch"]["max_tokens"] = 1024
    small = Config.model_validate(tree)
    return small, Request(
        config=small.model_dump(mode="json"),
        model=model,
        layers=-(-least // (stages * chunks)) * stages * chunks,
        experts=-(-2 * arch.experts.per_token // groups) * groups if arch.experts else None,
        world=replica * stages * data,
        rank=0,
        job="all",
    )


def trace_all(asked: Request, ask: Ask) -> dict[str, Any]:
    """Return the last answer to requests for every rank of a job, which compares them. A rank is asked for
    again if others tell it something else than was assumed, such as the shapes of both of its neighbours."""
    ranks: Sequence[int] = range(asked.world)
    for _ in range(_ROUNDS):
        seen = [ask(replace(asked, rank=rank)) for rank in ranks][-1]
        if not (ranks := seen["misled"]):
            break
    if ranks and not seen["differ"]:
        raise InputError(f"--trace all: what ranks {ranks} are told changes with every trace")
    return seen


def _compare_all(config: Config, whole: int, model: str, ask: Ask, *, use_json: bool) -> tuple[str, bool]:
    small, asked = make_smallest(config, model, whole)
    seen, p = trace_all(asked, ask), small.parallel
    agree = not seen["differ"]
    if use_json:
        return json.dumps({"ranks": asked.world, "calls": seen["calls"], "differ": seen["differ"]}), agree
    sizes = {"tensor": p.tensor, "pipeline": p.pipeline, "context": p.context, "expert": p.expert}
    sizes |= {"data": asked.world // p.model_size, "layers": asked.layers or 0}
    layout = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    head = f"{asked.world} ranks in place of {whole} ({layout}): {seen['calls']:,} calls"
    return "\n".join([f"{head}: {'sound' if agree else 'ranks differ'}", *seen["differ"]]), agree


def as_text(seen: dict[str, Any], rank: int, world: int) -> str:
    """Return tables of a trace."""
    count = seen["micro_batches"]
    lines = [
        f"rank {rank} of {world} without a GPU: no kernel ran; shapes, memory, messages and syncs are those "
        f"of the run's own code. {count} micro-batches",
        f"most in an update {seen['peaks']['update'] / GIB:.2f} GiB; planned {seen['planned'] / GIB:.2f} GiB",
        "",
        f"{'phase':<10}{'peak, GiB':>11}{'TFLOP':>9}{'launches':>10}{'syncs':>7}{'sent, GiB':>11}",
    ]
    syncs: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for sync in seen["syncs"]:
        syncs[sync["phase"]] += sync["count"]
    for call in seen["collectives"]:
        sent[call["phase"]] += call["sent"]
    for phase, peak in seen["peaks"].items():
        flops, launches = seen["flops"].get(phase, 0) / 1e12, seen["launches"].get(phase, 0)
        row = f"{phase:<10}{peak / GIB:>11.2f}{flops:>9.2f}{launches:>10}{syncs[phase]:>7}"
        lines.append(f"{row}{sent[phase] / GIB:>11.3f}")
    lines += ["", "held at the peak, GiB, by the line that made it"]
    for tensor in seen["at_peak"][:_LINES]:
        lines.append(f"{tensor['value'] / GIB:>8.3f}  {tensor['phase']}: {Site(**tensor['site'])}")
    lines += ["", "sent in old pass and updates, GiB, by group"]
    groups: Counter[str] = Counter()
    for call in seen["collectives"]:
        if call["phase"] in ("old pass", "update"):
            groups[f"{_group(call['ranks'], seen['groups'])}: {call['name'].strip('_')}"] += call["sent"]
    lines += [f"{size / GIB:>8.3f}  {name}" for name, size in groups.most_common()]
    lines += ["", "host syncs in old pass and updates"]
    for sync in sorted(seen["syncs"], key=lambda sync: -sync["count"]):
        if sync["phase"] in ("old pass", "update"):
            lines.append(f"{sync['count']:>8}  {sync['phase']}: {sync['kind']} at {Site(**sync['site'])}")
    return "\n".join(lines)


def _group(ranks: list[int], groups: dict[str, list[int]]) -> str:
    """Return the group's name, and the links it uses: a node has eight GPUs."""
    names = [name for name, members in groups.items() if members == ranks]
    inside = len({rank // 8 for rank in ranks}) == 1
    return f"{names[0] if names else f'{len(ranks)} ranks'} {'in a node' if inside else 'between nodes'}"
