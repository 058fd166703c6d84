"""Checks that all ranks have the same configuration, data, package versions and run folder.

Nodes can differ without an error: a relative ``run.folder`` on local disks, another copy of the data, a
configuration edited on one node, or an environment updated on all but one. Such a run would train and give
wrong results. So ranks are compared before weights are loaded.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_fspo.config import Config
from megatron_fspo.errors import InputError
from megatron_fspo.job.lock import read_owner
from megatron_fspo.job.rank_status import named_ranks
from megatron_fspo.parallel.control import Control

_PACKAGES = ("megatron-fspo", "torch", "megatron-core", "transformer-engine", "transformers", "safetensors")
_SMALL = (".json", ".jinja", ".txt", ".model")
"""Suffixes of the files of a configuration and a tokenizer."""
_NOTHING = "none"
VISIBLE_SECONDS = 75.0
"""Time limit for a new file to become visible on other machines: NFS caches names for a minute."""
_POLL_SECONDS = 0.5


def prove_same(config: Config, also: Mapping[str, str], *, trains: bool = True, resume: str = "no") -> None:
    """Check that all ranks have the same configuration, data, tokenizer, versions, ``--resume`` and facts in
    ``also``; training data only if ``trains``. Raises ``InputError`` on every rank, with the first difference
    and its ranks. Collective."""
    if dist.get_world_size() == 1:
        return
    every = _gather((socket.gethostname(), {**facts(config, trains=trains), "--resume": resume, **also}))
    if problem := difference(every):
        raise InputError(problem)


def prove_folder_is_shared(folder: Path, control: Control, nonce: str) -> None:
    """Check that all ranks see the lock file that the first rank made in the run folder. Raises
    ``InputError`` on every rank, which names the ranks that do not. Collective."""
    if dist.get_world_size() == 1:
        return
    deadline, seen = time.monotonic() + VISIBLE_SECONDS, False
    while not seen and time.monotonic() < deadline:
        with suppress(OSError):
            owner = read_owner(folder)
            seen = owner is not None and owner.nonce == nonce
        if not seen:
            time.sleep(_POLL_SECONDS)
    control.barrier("all ranks to look into the run folder")
    every = _gather((socket.gethostname(), str(Path.cwd()), seen))
    blind = [rank for rank, (_, _, seen) in enumerate(every) if not seen]
    if blind:
        host, cwd, _ = every[blind[0]]
        raise InputError(
            f"run.folder: rank 0 ({every[0][0]}, started in {every[0][1]}) wrote a file in {folder} that "
            f"{named_ranks(blind)} ({host}, started in {cwd}) cannot see: all nodes need one shared folder, "
            "given by its full path"
        )


def difference(every: Sequence[tuple[str, Mapping[str, str]]]) -> str | None:
    """Describe the first fact that differs between ranks; None if all agree. ``every`` has the host and the
    facts by name of each rank."""
    names = dict.fromkeys(name for _, facts in every for name in facts)
    for name in names:
        having: dict[str, list[int]] = {}
        for rank, (_, facts) in enumerate(every):
            having.setdefault(facts.get(name, _NOTHING), []).append(rank)
        if len(having) > 1:
            values = (f"{v} on {named_ranks(ranks)} ({every[ranks[0]][0]})" for v, ranks in having.items())
            return f"{name} differs between ranks: {'; '.join(values)}"
    return None


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that affect results, by name."""
    installed = {}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def facts(config: Config, *, trains: bool) -> dict[str, str]:
    """Readable name → value of everything that must be the same on all ranks; causes before consequences."""
    packages = dict.fromkeys(_PACKAGES, _NOTHING) | versions()
    values = {"the version of Python": platform.python_version()}
    values |= {f"the version of {package}": version for package, version in packages.items()}
    for section, keys in config.model_dump(mode="json").items():
        values |= {f"{section}.{key}": repr(value) for key, value in keys.items()}
    for key, sets in (("train", config.data.train_sets), ("validation", config.data.validation_sets)):
        for dataset in sets if trains or key == "validation" else ():
            values[f"the file of data.{key}, {dataset.file},"] = _digest([dataset.file])
    small = sorted(path for path in config.model.checkpoint.glob("*") if path.suffix in _SMALL)
    values["the configuration and tokenizer in model.checkpoint"] = _digest(small)
    if config.loss.name == "fspo" and config.loss.noise is not None:
        values[f"the file of loss.noise, {config.loss.noise},"] = _digest([config.loss.noise])
    return values


def _digest(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return f"SHA-256 {digest.hexdigest()[:16]}"


def _gather(mine: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every
