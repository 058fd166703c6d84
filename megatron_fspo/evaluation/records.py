"""The folder of an evaluation: its manifest, problems and completions, and how to resume it.

``manifest.json`` has the settings, with hashes of weights and data; ``problems.jsonl`` has the problems;
``samples.jsonl`` has one completion with its score per line, in a fixed order.

Completions are sampled and written in fixed portions. Resuming truncates the file after its last complete
portion and continues with the next one, so batches, and therefore rounding, are those of an uninterrupted
evaluation.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Literal, TypeVar

from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.types import Prompt

MANIFEST = "manifest.json"
PROBLEMS = "problems.jsonl"
SAMPLES = "samples.jsonl"

Key = tuple[str, int, int]
"""Name of the set, index of the prompt, number of the sample."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One completion with its score: a line of ``samples.jsonl``."""

    dataset: str
    """The key in the file is ``set``."""
    index: int
    sample: int
    """Number of the completion among the prompt's, from 0."""
    response: str
    """Text without the stop token."""
    answer: str | None
    """Answer extracted from the response; None if there is none."""
    score: float
    tokens: int
    """Length, stop token included."""
    finish_reason: Literal["stop", "length"]

    @property
    def key(self) -> Key:
        return self.dataset, self.index, self.sample


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A line of ``problems.jsonl``."""

    dataset: str
    """The key in the file is ``set``."""
    index: int
    id: str
    """Identifies task and answer, independently of tokenizer and chat template."""
    prompt: str
    """Text of the prompt after the chat template."""
    answer: str

    @classmethod
    def of(cls, prompt: Prompt, dataset: str) -> Problem:
        """Make the problem of a prompt. Its id hashes the row of the data file, or else the prompt's text."""
        return cls(
            dataset=dataset,
            index=prompt.index,
            id=_digest([dict(prompt.fields) or prompt.text, prompt.answer])[:16],
            prompt=prompt.text,
            answer=prompt.answer,
        )

    def __str__(self) -> str:
        return f"{self.dataset} {self.index} ({self.prompt[-40:]!r})"


Row = TypeVar("Row", Record, Problem)


@dataclass(frozen=True, kw_only=True)
class EvaluationManifest:
    """The settings of the evaluation in a folder."""

    model: str
    """Path of the checkpoint as given, for display."""
    samples: int | Mapping[str, int]
    """Completions per problem; by set if sets differ."""
    facts: Mapping[str, Any]
    """Name → value of everything that determines the results, as JSON types; long values are hashed."""

    @classmethod
    def load(cls, folder: Path) -> EvaluationManifest:
        """Read the file. Raises ``InputError`` if it is missing or damaged."""
        path = folder / MANIFEST
        try:
            manifest = cls(**json.loads(path.read_bytes()))
            samples = manifest.samples
            numbers = samples.values() if isinstance(samples, dict) else [samples]
            if not (isinstance(manifest.facts, dict) and all(isinstance(n, int) and n > 0 for n in numbers)):
                raise ValueError("samples or facts are missing")
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}): not an evaluation?") from None
        except (ValueError, TypeError) as error:
            raise InputError(f"{path}: not the manifest of an evaluation: {error}") from None
        return manifest


def write_whole(path: Path, text: str) -> None:
    """Write the file atomically."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)


def format_line(row: Record | Problem) -> str:
    values = asdict(row)
    return json.dumps({"set": values.pop("dataset"), **values}) + "\n"


@dataclass(frozen=True, kw_only=True)
class SavedEvaluation:
    """A complete evaluation, read from its folder."""

    manifest: EvaluationManifest
    problems: tuple[Problem, ...]
    records: tuple[Record, ...]


class RecordFile:
    """Writes ``samples.jsonl``, on the first rank only.

    Args:
        folder: existing folder, empty or with an interrupted evaluation.
        manifest: settings, which must equal those of an interrupted evaluation.
        problems: all problems.
        portions: keys of the completions that are sampled together, in order.
        check: called before each write; may raise if the folder's lock was lost.

    Raises:
        InputError: the folder has another evaluation, or is damaged; names the fact or line.
    """

    def __init__(
        self,
        folder: Path,
        manifest: EvaluationManifest,
        problems: Sequence[Problem],
        portions: Sequence[Sequence[Key]],
        *,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self.folder = folder
        self._check = check
        self._path = folder / SAMPLES
        if (folder / MANIFEST).exists():
            before, now = EvaluationManifest.load(folder).facts, json.loads(json.dumps(manifest.facts))
            for name in {**now, **before}:
                if before.get(name) != now.get(name):
                    raise InputError(
                        f"{folder} has the results of another evaluation: {name}: {before.get(name)} -> "
                        f"{now.get(name)}. Name another folder with --out, or remove this one"
                    )
        elif self._path.exists():
            raise InputError(f"{folder} has {SAMPLES} but no {MANIFEST}: not an evaluation, or damaged")
        else:
            (folder / PROBLEMS).write_text("".join(map(format_line, problems)), encoding="utf-8")
            write_whole(folder / MANIFEST, json.dumps(asdict(manifest), indent=1) + "\n")
        self._path.touch()
        self._portions = list(portions)
        self.done = self._cut()

    @property
    def left(self) -> int:
        """Number of completions still missing."""
        return sum(map(len, self._portions[self.done :]))

    def append(self, records: Sequence[Record]) -> None:
        """Write the next portion. Raises ``ValueError`` for other records, ``TrainingError`` on failure."""
        if [record.key for record in records] != list(self._portions[self.done]):
            raise ValueError(f"the records are not those of portion {self.done}")
        self._check()
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(map(format_line, records)))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise TrainingError(
                f"{self._path} cannot be written: {error.strerror}. Fix this and repeat the command, "
                "which continues the evaluation"
            ) from None
        self.done += 1

    def _cut(self) -> int:
        """Truncate the file after its last complete portion; return the number of complete portions."""
        keys = list(chain(*self._portions))
        sizes: list[int] = []
        for raw, record in _read(self._path, Record):
            if keys[len(sizes) : len(sizes) + 1] != [record.key]:
                key = f"set {record.dataset}, prompt {record.index}, sample {record.sample}"
                raise InputError(
                    f"{self._path}:{len(sizes) + 1}: {key} is out of order: the file was changed"
                )
            sizes.append(len(raw))
        ends = [end for end in accumulate(map(len, self._portions)) if end <= len(sizes)]
        os.truncate(self._path, sum(sizes[: ends[-1]]) if ends else 0)
        return len(ends)


def load(folder: Path) -> SavedEvaluation:
    """Read an evaluation. Raises ``InputError`` if there is none, or if it is incomplete or damaged."""
    manifest = EvaluationManifest.load(folder)
    problems = tuple(problem for _, problem in _read(folder / PROBLEMS, Problem))
    records = tuple(record for _, record in _read(folder / SAMPLES, Record))
    own = manifest.samples
    try:
        samples = {p.dataset: own if isinstance(own, int) else own[p.dataset] for p in problems}
    except KeyError as error:
        raise InputError(f"{folder / MANIFEST}: no samples of set {error}: the file is damaged") from None
    wanted = {(p.dataset, p.index, n) for p in problems for n in range(samples[p.dataset])}
    if {record.key for record in records} != wanted or len(records) != len(wanted):
        raise InputError(
            f"{folder} has {len(records)} of {len(wanted)} completions: repeat its command to continue"
        )
    return SavedEvaluation(manifest=manifest, problems=problems, records=records)


def hash_of_prompts(prompts: Sequence[Prompt]) -> str:
    """Return the SHA-256 of the problems of a set and their prompt tokens."""
    return _digest([[p.index, list(p.token_ids), p.answer, Problem.of(p, "").id] for p in prompts])


def _read(path: Path, kind: type[Row]) -> Iterator[tuple[bytes, Row]]:
    """Yield bytes and content of every line, except for an unfinished last line."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    continue
                try:
                    values = json.loads(raw)
                    row = kind(dataset=values.pop("set"), **values)
                    if isinstance(row, Record):
                        sound = isinstance(row.score, int | float) and isinstance(row.tokens, int)
                        if not sound:
                            raise ValueError("score or tokens are not numbers")
                except (ValueError, TypeError, KeyError, AttributeError):
                    name = "completion" if kind is Record else "problem"
                    raise InputError(
                        f"{path}:{number}: not a {name}: the file was changed or is damaged"
                    ) from None
                yield raw, row
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
