"""Reads and checks a run's inputs before process groups are built; also describes the machine."""

from __future__ import annotations

import asyncio
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fspo.config import Config
from megatron_fspo.data.check import examine
from megatron_fspo.data.cursor import mixture, most_at_once
from megatron_fspo.data.hub import from_hub
from megatron_fspo.data.prompts import LoadedSet, load_sets, notes
from megatron_fspo.data.tasks import Which, make_sources
from megatron_fspo.data.tokenizer import check_vocabulary, load_tokenizer, stop_token_ids
from megatron_fspo.environments.agent import AgentEnvironment
from megatron_fspo.environments.text import TextEnvironment
from megatron_fspo.errors import Attempts, InputError
from megatron_fspo.job.consistency import versions
from megatron_fspo.job.resume import Resume, check_writable, checkpoints_to_resume
from megatron_fspo.mcore.machine.backend import Backend, check_dtype, check_head, choose_backend
from megatron_fspo.mcore.machine.sizes import check_parallel, check_world, make_adapters, shares_prompts
from megatron_fspo.mcore.passes.fp8 import check_fp8
from megatron_fspo.objective.noise import Noise
from megatron_fspo.record.trackers import check_trackers
from megatron_fspo.rewards import check_reward
from megatron_fspo.rollout.client.connect import Needs, absent_servers, check_options
from megatron_fspo.trainer.noise import noise_of_run
from megatron_fspo.types import Environment, Prompt
from megatron_fspo.weights import (
    Architecture,
    check_checkpoint,
    open_checkpoint,
    read_adapters,
    read_architecture,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""``model.dtype`` → dtype."""
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The checked inputs of a run or evaluation."""

    config: Config
    backend: Backend
    arch: Architecture
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    train: tuple[Prompt, ...]
    """Prompts of all training sets, numbered across sets."""
    validation: tuple[Prompt, ...]
    """Prompts of all evaluation sets, numbered across sets; ``Prompt.dataset`` names the set."""
    noise: Noise | None
    """The noise in S, if ``loss.noise`` names a file."""
    notes: tuple[str, ...] = ()
    """Lines to log about layers, head, and data that was left out."""
    compared: Mapping[str, str] = field(default_factory=dict)
    """Name → value of what this rank found and every rank must find."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode tokens, including special ones, for rewards and the search for stop strings."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    @cached_property
    def environment(self) -> Environment | None:
        """The environment that ``environment.name`` names, or None."""
        return _environment(self.config, self.tokenizer, self.stop_token_ids)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters and activations."""
        return DTYPES[self.config.model.dtype]


def _adapted(config: Config, arch: Architecture, trains: bool) -> Architecture:
    """Add the adapters that the run trains to the architecture. Raises ``InputError`` if they are invalid."""
    arch = replace(arch, adapters=make_adapters(config.lora, arch) if trains else None)
    if arch.adapters and config.lora.start:
        read_adapters(config.lora.start, arch)
    return arch


def prepare(config: Config, *, world_size: int, elsewhere: bool = False, trains: bool = True) -> Inputs:
    """Read and check everything that the configuration names. Raises ``InputErrors`` with all independent
    errors. ``elsewhere``: the run will use GPUs of another machine, so skip checks that need them;
    ``trains``: False for an evaluation, which needs no training prompts, ``loss.noise`` or trackers."""
    config = from_hub(config)
    attempt, model, tensor = Attempts(), config.model, config.parallel.tensor
    backend: Backend | None
    if elsewhere:
        layers: Any = "local" if model.layers == "local" else "transformer_engine"
        backend = Backend(device=torch.device("cuda"), collectives="nccl", layers=layers)
    else:
        backend = attempt(lambda: choose_backend(model.backend, model.layers, model.head, tensor=tensor))
    arch = attempt(lambda: read_architecture(model.checkpoint))
    head: str | None = None
    if backend is not None:
        if not elsewhere:
            sizes = (arch.hidden_size, arch.vocab_size // tensor) if arch else ()
            head = attempt(partial(check_head, backend, DTYPES[model.dtype], *sizes))
            backend = replace(backend, head="torch") if head else backend
        attempt(lambda: shares_prompts(config, backend.layers, arch))
        attempt(lambda: check_dtype(backend, DTYPES[model.dtype]))
        if config.rollout.engine == "vllm":
            keys = ("rollout", "evaluation")
            temperatures = {f"{key}.temperature": getattr(config, key).temperature for key in keys}
            attempt(lambda: check_options(config.vllm, temperatures, cuda=backend.device.type == "cuda"))
    attempt(lambda: check_world(config.parallel, world_size))
    attempt(lambda: check_trackers(config.log) if trains else None)
    tokenizer: Any = None
    train: tuple[LoadedSet, ...] | None = ()
    validation: tuple[LoadedSet, ...] | None = ()
    if arch is not None:
        attempt(partial(check_parallel, arch, config.parallel))
        arch = attempt(partial(_adapted, config, arch, trains)) or arch
        if backend is not None:
            attempt(lambda: check_fp8(config.fp8, backend, arch, config.parallel, machine=not elsewhere))
        attempt(lambda: check_checkpoint(open_checkpoint(model.checkpoint, arch), arch))
        tokenizer = attempt(lambda: _tokenizer(config, arch))
    attempt.wrong(*_disagreements(config, world_size if trains else 0, arch))
    if tokenizer is not None:
        train = attempt(lambda: _train_sets(config, tokenizer)) if trains else ()
        validation = attempt(lambda: _load(config, "validation", tokenizer))
    else:
        for which in ("train", "validation") if trains else ("validation",):
            for source in make_sources(config.data, which):
                checked = attempt(partial(examine, source, None, 0))
                attempt.wrong(*(checked.broken[:1] if checked else ()))
    longest = config.rollout.max_response_tokens
    attempt(lambda: None if config.supervised else check_reward(config.reward, max_response_tokens=longest))
    noise = attempt(lambda: (noise_of_run(config) if trains else None,))
    attempt.end()
    assert backend and arch and train is not None and validation is not None and noise
    return Inputs(
        config=config,
        backend=backend,
        arch=arch,
        tokenizer=tokenizer,
        stop_token_ids=stop_token_ids(tokenizer, config.model.checkpoint, config.rollout.stop_token_ids),
        train=_prompts(train),
        validation=_prompts(validation),
        noise=noise[0],
        notes=(*backend.notes, *filter(None, [head]), *notes([*train, *validation])),
        compared={"the log-prob head (model.head = torch works everywhere)": head or "as configured"},
    )


def _disagreements(config: Config, world_size: int, arch: Architecture | None) -> Iterator[str]:
    """Yield errors of keys that do not fit each other, the number of ranks (0: evaluation), or the model."""
    data = world_size // config.parallel.model_size
    if config.rollout.prompts < data:
        yield (
            f"rollout.prompts = {config.rollout.prompts} is less than the {data} data-parallel ranks: some "
            "ranks would have no prompts"
        )
    longest, keys = config.longest_sequence
    if arch is not None and longest > arch.max_position_embeddings:
        yield (
            f"{keys} = {longest}, but the model's max_position_embeddings is {arch.max_position_embeddings}"
        )
    if arch is not None and arch.experts is None and config.moe.in_use:
        yield "the keys of [moe] need a mixture of experts, but the model is dense"
    if config.supervised and not world_size:
        yield "loss.name = sft: an evaluation samples responses to prompts with answers; name another loss"
    for which in ("train", "validation"):
        for source in make_sources(config.data, which):
            if source.responses != config.supervised:
                has = (
                    "has responses, which loss.name = sft learns" if source.responses else "has no responses"
                )
                yield (
                    f"data.{which}: the preset of {source.name} {has}, but loss.name is {config.loss.name} "
                    "(presets with responses: messages, completion)"
                )
    if config.data.validation is None and config.evaluation.every:
        yield "evaluation.every > 0 needs data.validation (or set evaluation.every = 0)"


def _tokenizer(config: Config, arch: Architecture) -> Any:
    tokenizer = load_tokenizer(config.model.checkpoint)
    check_vocabulary(tokenizer, arch.vocab_size)
    stops = stop_token_ids(tokenizer, config.model.checkpoint, config.rollout.stop_token_ids)
    _environment(config, tokenizer, stops)
    if config.teacher.checkpoint:
        _check_teacher(config, config.teacher.checkpoint, tokenizer)
    return tokenizer


def _check_teacher(config: Config, folder: Path, tokenizer: Any) -> None:
    """Raise ``InputError`` if the teacher cannot be loaded in the layout, or its token ids differ."""
    arch = read_architecture(folder)
    check_parallel(arch, config.parallel)
    check_checkpoint(open_checkpoint(folder, arch), arch)
    ours, theirs = tokenizer.get_vocab(), load_tokenizer(folder).get_vocab()
    if ours != theirs:
        differ = sorted(ours.items() ^ theirs.items())
        raise InputError(
            f"teacher.checkpoint = {folder}: {len(differ)} entries of its vocabulary, such as "
            f"{differ[0][0]!r}, differ from those of {config.model.checkpoint}: token ids do not compare"
        )


def _environment(config: Config, tokenizer: Any, stops: Sequence[int]) -> Environment | None:
    if config.environment.name is None:
        return None
    kind = AgentEnvironment if config.environment.name == "agent" else TextEnvironment
    return kind(config.environment, tokenizer, stops)


def _load(config: Config, which: Which, tokenizer: Any) -> tuple[LoadedSet, ...]:
    stops = stop_token_ids(tokenizer, config.model.checkpoint, config.rollout.stop_token_ids)
    longest = config.rollout.max_response_tokens
    return load_sets(config.data, which, tokenizer, stops=stops, max_response_tokens=longest)


def _train_sets(config: Config, tokenizer: Any) -> tuple[LoadedSet, ...]:
    train = _load(config, "train", tokenizer)
    mixed = mixture(_prompts(train), config.data)
    asked = config.rollout.prompts
    for dataset, most in zip(train, most_at_once(mixed, asked), strict=True):
        if most > len(dataset.prompts):
            share = f", up to {most} of them of {dataset.source.name}" if len(train) > 1 else ""
            left_out = f" (left out: {dataset.left_out()})" if dataset.left_out() else ""
            raise InputError(
                f"rollout.prompts = {asked}{share}, but {dataset.source.file} has only "
                f"{len(dataset.prompts)} prompts{left_out}"
            )
    return train


def _prompts(sets: Sequence[LoadedSet]) -> tuple[Prompt, ...]:
    return tuple(prompt for dataset in sets for prompt in dataset.prompts)


def check_run(config: Config, *, world_size: int, resume: Resume, here: bool) -> list[str]:
    """Check a run's inputs, folder and servers, for ``train --check``. Return a line for each thing that was
    not checked or is not available yet. Raises ``InputErrors`` with all errors.

    ``here``: the run will start now and on this machine. Otherwise, as on a login node, servers may be
    unreachable, and without a GPU the checks that need one are skipped.
    """
    elsewhere = not here and config.model.backend == "cuda" and not torch.cuda.is_available()
    attempt = Attempts()
    inputs = attempt(lambda: prepare(config, world_size=world_size, elsewhere=elsewhere))
    attempt(lambda: checkpoints_to_resume(config, resume))
    attempt(lambda: check_writable(config.run_folder, probe=True))
    absent: list[str] = []
    if config.rollout.engine == "vllm":
        # Servers may still load; errors that are known need no wait.
        seconds = config.vllm.recovery_seconds if here and inputs else 0.0
        servers = absent_servers(config.vllm, make_needs(config), seconds=seconds)
        absent = attempt(lambda: asyncio.run(servers)) or []
    attempt.wrong(*(absent if here else ()))
    attempt.end()
    assert inputs
    unchecked = ["no GPU here: model.layers, model.head and fp8 were not checked"] if elsewhere else []
    return [*unchecked, *absent, *loss_notes(config), *inputs.notes]


def loss_notes(config: Config) -> list[str]:
    """Return what the loss says about the run before it starts."""
    updates = config.off_policy_updates
    return config.loss.notes(rollouts=config.rollouts_after_warmup, off_policy_updates=updates)


def make_needs(config: Config) -> Needs:
    """Return the features that a run needs its servers to have."""
    routes, (length, _) = config.moe.replay == "rollout", config.longest_sequence
    return Needs(length=length, routes=routes, lora_rank=config.lora.rank)


def machine(backend: Backend) -> dict[str, Any]:
    """Describe this rank's machine as JSON types, for the run's report: number of ``processes`` in the job,
    name of the ``device``, ``cpu``, ``cores``, kind of ``layers``, and ``versions`` of packages."""
    cpu = cpu_name(_CPUINFO.read_text(encoding="utf-8", errors="replace") if _CPUINFO.exists() else "")
    cuda = {"CUDA": torch.version.cuda} if backend.device.type == "cuda" and torch.version.cuda else {}
    return {
        "processes": dist.get_world_size(),
        "device": torch.cuda.get_device_name(backend.device) if backend.device.type == "cuda" else "CPU",
        "cpu": cpu,
        "cores": os.cpu_count(),
        "layers": backend.layers,
        "versions": {"Python": platform.python_version(), **versions(), **cuda},
    }


def cpu_name(cpuinfo: str) -> str:
    """Return the processor's name from the text of ``/proc/cpuinfo``, or the architecture if it has none."""
    name = re.search(r"^model name\s*:\s*(\S.*?)\s*$", cpuinfo, re.MULTILINE)
    return name[1] if name else platform.machine()
