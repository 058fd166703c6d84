"""The folder of an evaluation: its problems, every completion, and how an interrupted one goes on.

``manifest.json`` says what is evaluated and how, with hashes of weights and data; ``problems.jsonl`` has the
problems; ``samples.jsonl`` every completion with its score, one a line, in an order known beforehand.

Completions are asked for in portions, always the same ones, and are written portion by portion. Whoever goes
on cuts the file at the end of the last whole portion, a half-written line with it, and asks for the next one:
what shares a batch is then what shared it in an undisturbed run, down to the rounding.
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
"""Set, index of the prompt, and number of the sample."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One completion with its score: a line of ``samples.jsonl``.

    Example::

        Record(dataset="validation", index=3, sample=0, response="300", answer="300", score=0.0, tokens=4,
               finish_reason="stop")
    """

    dataset: str
    """The key in the file is ``set``."""
    index: int
    """Index of its prompt."""
    sample: int
    """Number of the completion among the prompt's, from 0."""
    response: str
    """Text, without the stop token."""
    answer: str | None
    """Extracted from the response; None where there is none."""
    score: float
    tokens: int
    """Length, the stop token included."""
    finish_reason: Literal["stop", "length"]

    @property
    def key(self) -> Key:
        """The key of the completion."""
        return self.dataset, self.index, self.sample


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A line of ``problems.jsonl``."""

    dataset: str
    """The key in the file is ``set``."""
    index: int
    id: str
    """Equal for the same task and answer, whatever tokenizer and chat template made a prompt of it."""
    prompt: str
    """Text as the model reads it."""
    answer: str

    @classmethod
    def of(cls, prompt: Prompt, dataset: str) -> Problem:
        """The problem of a prompt; the task is its row in the data file, or its text where no row is kept."""
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
    """The evaluation that a folder holds."""

    model: str
    """The checkpoint, as it was named: for people."""
    samples: int | Mapping[str, int]
    """Completions of each problem; by set, where sets differ."""
    facts: Mapping[str, Any]
    """All that decides the results, by name, as JSON types: hashes of what is long."""

    @classmethod
    def load(cls, folder: Path) -> EvaluationManifest:
        """Read the file; ``InputError`` where there is none, or a damaged one."""
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
    """Write the file whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.rename(path)


def line_of(row: Record | Problem) -> str:
    """The row as JSON, with a line feed."""
    values = asdict(row)
    return json.dumps({"set": values.pop("dataset"), **values}) + "\n"


@dataclass(frozen=True, kw_only=True)
class SavedEvaluation:
    """A finished evaluation, read back."""

    manifest: EvaluationManifest
    problems: tuple[Problem, ...]
    records: tuple[Record, ...]
    """Completions in the order of the file."""


class RecordFile:
    """``samples.jsonl`` while an evaluation writes it: on the first rank, which holds the folder.

    Args:
        folder: there already; new, or of an evaluation that was stopped.
        portions: completions that are asked for together, in their order.
        check: is called before anything is written; may raise, where the folder is no longer ours.

    Raises:
        InputError: the folder is of another evaluation, or damaged; names the fact or line.
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
            raise InputError(f"{folder} has {SAMPLES} and no {MANIFEST}: not an evaluation, or a damaged one")
        else:
            (folder / PROBLEMS).write_text("".join(map(line_of, problems)), encoding="utf-8")
            write_whole(folder / MANIFEST, json.dumps(asdict(manifest), indent=1) + "\n")
        self._path.touch()
        self._portions = list(portions)
        self.done = self._cut()

    @property
    def left(self) -> int:
        """Completions that it lacks."""
        return sum(map(len, self._portions[self.done :]))

    def append(self, records: Sequence[Record]) -> None:
        """Write the next portion.

        Raises:
            ValueError: it is another one.
            TrainingError: the disk is full, say.
        """
        if [record.key for record in records] != list(self._portions[self.done]):
            raise ValueError(f"these are not the records of portion {self.done}")
        self._check()
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(map(line_of, records)))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise TrainingError(
                f"{self._path} cannot be written: {error.strerror}. Mend that; the same command goes on from "
                "what is there"
            ) from None
        self.done += 1

    def _cut(self) -> int:
        """Portions that the file holds whole; what comes after them goes."""
        keys = list(chain(*self._portions))
        sizes: list[int] = []
        for raw, record in _read(self._path, Record):
            if keys[len(sizes) : len(sizes) + 1] != [record.key]:
                key = f"set {record.dataset}, prompt {record.index}, sample {record.sample}"
                raise InputError(
                    f"{self._path}:{len(sizes) + 1}: {key} does not come here: the file was changed"
                )
            sizes.append(len(raw))
        ends = [end for end in accumulate(map(len, self._portions)) if end <= len(sizes)]
        os.truncate(self._path, sum(sizes[: ends[-1]]) if ends else 0)
        return len(ends)


def load(folder: Path) -> SavedEvaluation:
    """A finished evaluation.

    Raises:
        InputError: it is not finished, or no evaluation, or damaged.
    """
    manifest = EvaluationManifest.load(folder)
    problems = tuple(problem for _, problem in _read(folder / PROBLEMS, Problem))
    records = tuple(record for _, record in _read(folder / SAMPLES, Record))
    own = manifest.samples
    try:
        samples = {p.dataset: own if isinstance(own, int) else own[p.dataset] for p in problems}
    except KeyError as error:
        raise InputError(f"{folder / MANIFEST}: no samples of set {error}: it is damaged") from None
    wanted = {(p.dataset, p.index, n) for p in problems for n in range(samples[p.dataset])}
    if {record.key for record in records} != wanted or len(records) != len(wanted):
        raise InputError(
            f"{folder} has {len(records)} of {len(wanted)} completions: go on with the command that began it"
        )
    return SavedEvaluation(manifest=manifest, problems=problems, records=records)


def hash_of_prompts(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of the problems of a set, and of the tokens that the model reads."""
    return _digest([[p.index, list(p.token_ids), p.answer, Problem.of(p, "").id] for p in prompts])


def _read(path: Path, kind: type[Row]) -> Iterator[tuple[bytes, Row]]:
    """Bytes and content of every line; a last one without its end is left out."""
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
                            raise ValueError("score or tokens are no numbers")
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
