"""Standalone evaluation of a checkpoint, with a folder of results and comparison with another evaluation.

The model has no optimizer and no gradient buffers. It is not built if no responses are left to sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from megatron_fspo.errors import InputError
from megatron_fspo.evaluation import results
from megatron_fspo.evaluation.records import (
    EvaluationManifest,
    Problem,
    RecordFile,
    SavedEvaluation,
    hash_of_prompts,
    load,
)
from megatron_fspo.evaluation.summary import compare, match, per_problem, summarize
from megatron_fspo.job.consistency import prove_same
from megatron_fspo.job.lock import FolderLock
from megatron_fspo.mcore.machine.startup import start
from megatron_fspo.parallel.groups import ParallelGroups, agreed
from megatron_fspo.rewards import Grader
from megatron_fspo.rollout.engine import RolloutEngine
from megatron_fspo.trainer.build import build_engine, load_model, open_servers
from megatron_fspo.trainer.evaluate import by_set, evaluate, num_responses, portions, sample_and_grade, shared
from megatron_fspo.trainer.prepare import Inputs
from megatron_fspo.trainer.sampling import make_grader
from megatron_fspo.types import Prompt
from megatron_fspo.weights.folder import digest


def evaluate_checkpoint(
    inputs: Inputs, *, out: Path | None = None, other: Path | None = None
) -> dict[str, float]:
    """Start the process groups, evaluate ``model.checkpoint``, and return its metrics on every rank, under
    ``val/`` and, for a comparison, ``difference/``. Collective.

    Args:
        inputs: checked inputs, with the checkpoint and the validation sets.
        out: folder for the results; an interrupted evaluation in it continues. None saves nothing.
        other: results folder of another evaluation to compare with; ignored without ``out``.

    Raises:
        InputError: ranks differ, a folder is not valid, or the evaluations have different problems.
    """
    groups = start(inputs.backend, parallel=inputs.config.parallel, seed=inputs.config.run.seed)
    prove_same(inputs.config, inputs.compared, trains=False)
    mine = {name: hash_of_prompts(prompts) for name, prompts in by_set(inputs).items()}
    if agreed(mine, groups) != mine:
        raise InputError(f"rank {dist.get_rank()} has other evaluation prompts than rank 0")
    if out is None:
        with _sampler(inputs, groups) as (engine, grader):
            with _bar(num_responses(inputs), groups) as bar:
                return evaluate(inputs, engine, groups, grader, bar.update).metrics
    compared = load(other) if other is not None and dist.get_rank() == 0 else None
    with _opened(inputs, groups, out, compared) as file:
        left = agreed(file.left if file is not None else 0, groups)
        if left:
            with _sampler(inputs, groups) as (engine, grader), _bar(left, groups) as bar:
                sample_and_grade(inputs, engine, groups, grader, bar.update, file)
        metrics: dict[str, float] = {}
        if file is not None:
            saved = load(out)
            summary = summarize(per_problem(saved.records), saved.manifest.samples)
            comparison = compare(saved, compared) if compared is not None else None
            results.write(out, saved.manifest, summary, comparison)
            metrics = results.summary_metrics(summary)
            if comparison is not None:
                metrics |= results.summary_metrics(comparison.differences, "difference")
        return shared(metrics, groups)


def facts(inputs: Inputs, sets: Mapping[str, Sequence[Prompt]], ranks: int) -> dict[str, Any]:
    """Return everything that determines the results of an evaluation, by name, as JSON types. With the
    embedded engine, this includes what determines the batches of tokens, and hence the rounding."""
    config = inputs.config
    sections = config.model_dump(mode="json")
    known: dict[str, Any] = {"model.checkpoint sha256": hash_of_checkpoint(config.model.checkpoint)}
    known |= {f"{name} sha256": hash_of_prompts(prompts) for name, prompts in sets.items()}
    keys = ["evaluation.samples", "evaluation.temperature", "evaluation.top_p", "run.seed", "model.dtype"]
    keys += ["rollout.max_response_tokens", "rollout.engine"] + ["rollout.stop"] * bool(config.rollout.stop)
    keys += [f"{section}.{key}" for section in ("fp8", "reward") for key in sections[section]]
    if config.rollout.engine == "embedded":
        keys += ["rollout.max_batch", "parallel.tensor", "parallel.pipeline", "parallel.virtual_pipeline"]
        keys += ["parallel.context", "parallel.expert"]
        known |= {"ranks": ranks, "device": inputs.backend.device.type, "layers": inputs.backend.layers}
    for section, _, key in (key.partition(".") for key in keys):
        known[f"{section}.{key}"] = sections[section][key]
    # Resolved values: a set that spells out the default is the same evaluation.
    known["evaluation.samples"] = _one_if_equal(config.evaluation_samples)
    return known | {"stop tokens": list(inputs.stop_token_ids)}


def _one_if_equal(samples: dict[str, int]) -> int | dict[str, int]:
    """Return the number of samples if it is the same for all sets, else the numbers by set."""
    numbers = set(samples.values())
    return numbers.pop() if len(numbers) == 1 else samples


def hash_of_checkpoint(folder: Path) -> str:
    """Hash the names and contents of all files of a checkpoint, except hidden and Markdown files."""
    paths = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".md"
        if not any(name.startswith(".") for name in path.relative_to(folder).parts)
    )
    with ThreadPoolExecutor(4) as pool:  # hashing releases the GIL
        digests = list(pool.map(digest, paths))
    names = (path.relative_to(folder).as_posix() for path in paths)
    listing = "".join(f"{name}\0{digest}\0" for name, digest in zip(names, digests, strict=True))
    return hashlib.sha256(listing.encode()).hexdigest()


@contextmanager
def _opened(
    inputs: Inputs, groups: ParallelGroups, out: Path, compared: SavedEvaluation | None
) -> Iterator[RecordFile | None]:
    """Lock the results folder; yield its file of completions on the first rank, else None. Collective."""
    what = "the results folder to be opened"
    if dist.get_rank() != 0:
        groups.control.barrier(what)
        yield None
        return
    config, sets = inputs.config, by_set(inputs)
    problems = [Problem.of(prompt, name) for name, prompts in sets.items() for prompt in prompts]
    if compared is not None:
        match(problems, compared.problems, f"{config.model.checkpoint} and {compared.manifest.model}")
    manifest = EvaluationManifest(
        model=str(config.model.checkpoint),
        samples=_one_if_equal(config.evaluation_samples),
        facts=facts(inputs, sets, dist.get_world_size()),
    )
    asked = [portion.keys for portion in portions(inputs, groups.dp.size())]
    with groups.control.waiting("the lock of the results folder") as wait:
        lock = FolderLock(out, pause=wait.check)
    try:
        file = RecordFile(out, manifest, problems, asked, check=lock.check)
        groups.control.barrier(what)
        yield file
    finally:
        lock.release()


@contextmanager
def _sampler(inputs: Inputs, groups: ParallelGroups) -> Iterator[tuple[RolloutEngine, Grader | None]]:
    """Yield an engine with the weights of ``model.checkpoint``, and the grader or None. Collective."""
    servers = open_servers(inputs, groups)
    engine = build_engine(inputs, load_model(inputs, groups), servers)
    engine.update_weights(0)
    grader = make_grader(inputs.config, groups)
    try:
        with grader or nullcontext():
            yield engine, grader
    finally:
        engine.close()


def _bar(responses: int, groups: ParallelGroups) -> Any:
    """Return a progress bar over this rank's responses; only the first rank shows it, on a terminal."""
    disable = None if dist.get_rank() == 0 else True
    return tqdm(
        total=responses // groups.dp.size(), desc="evaluating", unit="response", leave=False, disable=disable
    )
