"""The file of a sweep, and the runs that it stands for."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import Field, PositiveInt, StringConstraints, ValidationError

from megatron_fspo.config import Config
from megatron_fspo.config.loading import load_config
from megatron_fspo.errors import InputError
from megatron_fspo.section import Section

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
Keys = Mapping[str, Mapping[str, Any]]
"""Section → key → value, as in the file of a run."""


class Sweep(Section):
    """The content of the file.

    Example::

        config = ["examples/make_sum/run.toml"]
        folder = "runs/sweep"
        seeds = [1, 2, 3]
        jobs = 2
        match = "fspo"

        [keys.run]
        steps = 20

        [arms.fspo]

        [arms.rloo.loss]
        name = "rloo"
    """

    config: Annotated[tuple[Path, ...], Field(min_length=1)]
    """Files of the run that all arms begin from; a later one changes those before."""
    folder: Path
    """Folder of the runs."""
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (1,)
    jobs: PositiveInt = 1
    """Runs at a time."""
    nproc: PositiveInt = 1
    """Processes of each."""
    keys: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Keys of every run."""
    arms: Annotated[dict[Name, dict[str, dict[str, Any]]], Field(min_length=1)]
    """Name → keys that a run of the arm has and others do not."""
    words: tuple[str, ...] = ()
    """Words for the command line of every run, such as ``--run.steps 4``; they win over all other keys."""
    match: Name | None = None
    """The arm to whose share really clipped the others' limits are scaled, seed by seed."""
    unmatched: tuple[Name, ...] = ()
    """Other arms whose limits stay as they are."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One run of a sweep."""

    name: str
    arm: str
    seed: int
    keys: Keys
    """Keys that it changes in the sweep's files."""


def read_sweep(path: Path) -> Sweep:
    """Return the sweep of a file.

    Raises:
        InputError: it cannot be read, or a line is wrong.
    """
    try:
        sweep = Sweep.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: {error}") from None
    except ValidationError as error:
        raise InputError(f"{path}: {_complaint(error)}") from None
    if len(set(sweep.seeds)) < len(sweep.seeds):
        raise InputError(f"{path}: seeds: each once")
    for name in {sweep.match, *sweep.unmatched} - {None, *sweep.arms}:
        raise InputError(f"{path}: match = {name}: arms has {', '.join(sweep.arms)}")
    for where, keys in {"keys": sweep.keys, **sweep.arms}.items():
        for key in ("name", "folder", "seed"):
            if key in keys.get("run", {}):
                raise InputError(f"{path}: {where}: run.{key} is the sweep's to set")
    return sweep


def _complaint(error: ValidationError) -> str:
    """Return the first thing that is wrong, in the words of the file."""
    first = min(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    key, kind = ".".join(map(str, first["loc"])), first["type"]
    if kind == "missing" or (key, kind) == ("arms", "too_short"):
        return f"{key} is missing: a sweep needs config, folder, and a table [arms.NAME] for each arm"
    if kind == "extra_forbidden":
        close = difflib.get_close_matches(key, Sweep.model_fields, n=1)
        hint = f"; did you mean {close[0]}?" if close else f": there are {', '.join(Sweep.model_fields)}"
        return f"unknown key {key}{hint}"
    return f"{key} = {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"


def planned(sweep: Sweep) -> Iterator[Planned]:
    """Yield its runs: by seed, the arm that others are matched to first."""
    arms = sorted(sweep.arms, key=lambda arm: arm != sweep.match)
    for seed in sweep.seeds:
        for arm in arms:
            name = f"{arm}-{seed}"
            run = {"name": name, "folder": str(sweep.folder), "seed": seed}
            keys = _laid_over(sweep.keys, sweep.arms[arm])
            yield Planned(name=name, arm=arm, seed=seed, keys={**keys, "run": {**keys.get("run", {}), **run}})


def make_run_config(
    sweep: Sweep, run: Planned, loss: Mapping[str, Any] | None = None
) -> tuple[Config, list[Path]]:
    """Return the configuration of a run, with ``loss`` in place of the planned section, and the files it is
    read from; its own is written into the sweep's folder.

    Raises:
        InputError: a key is wrong; the line names the file.
    """
    keys = dict(run.keys) if loss is None else {**run.keys, "loss": dict(loss)}
    path = sweep.folder / f"{run.name}.toml"
    sweep.folder.mkdir(parents=True, exist_ok=True)
    path.write_text(tomli_w.dumps(keys), encoding="utf-8")
    files = [*sweep.config, path]
    return load_config(files, sweep.words), files


def _laid_over(below: Keys, above: Keys) -> dict[str, dict[str, Any]]:
    """Return sections of both; where both have one, its keys, of which the upper win. A loss of another name
    is taken whole."""
    sections = {name: dict(keys) for name, keys in below.items()}
    for name, keys in above.items():
        mine = sections.get(name, {})
        other = "name" in keys and keys["name"] != mine.get("name")
        sections[name] = dict(keys) if other else {**mine, **keys}
    return sections
