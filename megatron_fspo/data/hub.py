"""Finds models and data sets by their names on the Hugging Face Hub, and downloads what is not cached.

A model is ``org/name`` or ``org/name@revision``; a data set the same, with ``:file`` after its name if it has
several, or a short name of :data:`KNOWN`. Files and folders on disk take precedence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_fspo.config import Config, DataSet
from megatron_fspo.config.data import Data, PresetName
from megatron_fspo.errors import InputError

KNOWN: dict[str, tuple[str, str, PresetName]] = {
    "dapo": ("BytedTsinghua-SIA/DAPO-Math-17k", "", "dapo"),
    "gsm8k": ("openai/gsm8k", "main/", "gsm8k"),
    "math500": ("HuggingFaceH4/MATH-500", "", "math500"),
    "amc23": ("math-ai/amc23", "", "amc"),
    "aime24": ("HuggingFaceH4/aime_2024", "", "aime"),
    "aime25": ("math-ai/aime25", "", "aime"),
}
"""Short name → data set, the folder of its files, and their format."""
_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w./-]+))?(?:@([\w.-]+))?")
_MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".txt")  # of files, not of data sets' names
_SPLITS = {"train": ("train", ""), "validation": ("test", "validation", "")}
"""Key → splits of a data set, the first that it has; "": its only file."""


def from_hub(config: Config) -> Config:
    """Replace names of models and data sets by paths in the Hub's local cache, whose folders are named by
    revision. Raises ``InputError`` if one is neither cached nor can be fetched."""
    model = config.model.model_copy(update={"checkpoint": find_checkpoint(config.model.checkpoint)})
    teacher = config.teacher
    if teacher.checkpoint:
        teacher = teacher.model_copy(update={"checkpoint": find_checkpoint(teacher.checkpoint)})
    return config.model_copy(update={"model": model, "teacher": teacher, "data": find_data(config.data)})


def find_data(data: Data) -> Data:
    """Replace names of data sets by files, as :func:`from_hub`."""
    return data.model_copy(update={key: _find_sets(data, key) for key in _SPLITS})


def find_checkpoint(checkpoint: Path, *, weights: bool = True) -> Path:
    """Return the folder of a model, only with its configuration and tokenizer unless ``weights``."""
    match = _NAME.fullmatch(str(checkpoint))
    if checkpoint.exists() or not match or match[2]:
        return checkpoint
    patterns = _MODEL_FILES if weights else [name for name in _MODEL_FILES if name != "*.safetensors"]

    def complete(folder: str) -> bool:
        index, needed = Path(folder, "model.safetensors.index.json"), {"config.json"}
        if weights and index.exists():
            needed |= set(json.loads(index.read_bytes())["weight_map"].values())
        elif weights:
            needed.add("model.safetensors")
        return all(Path(folder, name).exists() for name in needed)

    return Path(_fetch(match[1], complete, revision=match[3], allow_patterns=patterns))


def _find_sets(data: Data, key: str) -> Path | tuple[DataSet, ...] | None:
    given: Path | tuple[DataSet, ...] | None = getattr(data, key)
    if given is None:
        return None
    sets = given if isinstance(given, tuple) else (DataSet(file=given),)
    found = tuple(_find_set(one, key) for one in sets)
    return given if found == sets else found


def _find_set(one: DataSet, key: str) -> DataSet:
    name, within, preset = KNOWN.get(str(one.file), (str(one.file), "", None))
    match = _NAME.fullmatch(name)
    if one.file.exists() or not match or (one.file.suffix in _SUFFIXES and not match[2]):
        return one
    for repo, subfolder, form in KNOWN.values():
        if repo == match[1]:
            within, preset = subfolder, form
    options: dict[str, Any] = {"repo_type": "dataset", "revision": match[3]}
    patterns = [match[2]] if match[2] else [f"{within}*.parquet", f"{within}*.jsonl"]

    def files(folder: str) -> list[Path]:
        return sorted(path for pattern in patterns for path in Path(folder).rglob(pattern))

    folder = Path(_fetch(match[1], files, allow_patterns=patterns, **options))
    there = files(str(folder))
    for split in _SPLITS[key]:
        chosen = there if match[2] else [path for path in there if split in path.name]
        if len(chosen) == 1:
            title = one.name or (str(one.file) if str(one.file) in KNOWN else match[1].partition("/")[2])
            update = {"file": chosen[0], "name": title, "preset": one.preset or preset}
            return one.model_copy(update=update)
    names = ", ".join(str(path.relative_to(folder)) for path in there[:8]) or "no .parquet or .jsonl"
    raise InputError(f"data.{key} = {one.file}: it has {names}; name one: {match[1]}:FILE")


def _fetch(repo: str, complete: Callable[[str], object], **options: Any) -> str:
    """Return the folder of a repository in the cache, downloaded unless it is there and ``complete``."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    reason = "files are missing"
    for local in (True, False):
        try:
            folder: str = snapshot_download(repo, local_files_only=local, **options)
        except (HfHubHTTPError, HFValidationError, OSError) as error:  # no network is an OSError, too
            reason = str(error).strip().partition("\n")[0]
        else:
            if complete(folder):
                return folder
    kind = "--repo-type dataset " if options.get("repo_type") else ""
    raise InputError(
        f"{repo} is neither a path nor in the Hub's cache, and cannot be fetched ({reason:.120}): where "
        f"there is a network, run `hf download {kind}{repo}`"
    )
