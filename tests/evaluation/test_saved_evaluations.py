"""The folder of an evaluation: cut at portions, refused when it is another's, read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.evaluation.records import (
    MANIFEST,
    SAMPLES,
    EvaluationManifest,
    Key,
    Problem,
    Record,
    RecordFile,
    format_line,
    hash_of_prompts,
    load,
)
from megatron_fspo.types import Prompt

PORTIONS: list[list[Key]] = [
    [(name, i, n) for i in some for n in range(2)] for name, some in (("a", (0, 1)), ("a", (2,)), ("b", (3,)))
]
MANIFEST_OF = EvaluationManifest(model="m", samples=2, facts={"seed": 1, "stop": [12], "data sha256": "x"})
PROBLEM_OF = [
    Problem(dataset="a" if i < 3 else "b", index=i, id=str(i), prompt=f"p{i}", answer="1") for i in range(4)
]


def record(key: Key, response: str = 'x\u2028y\n"z" \U0001d49c') -> Record:
    return Record(
        dataset=key[0], index=key[1], sample=key[2], response=response, answer=None if key[2] else "1",
        score=0.1, tokens=3, finish_reason="stop",
    )  # fmt: skip


def opened(folder: Path, manifest: EvaluationManifest = MANIFEST_OF) -> RecordFile:
    return RecordFile(folder, manifest, PROBLEM_OF, PORTIONS)


def filled(folder: Path) -> bytes:
    file = opened(folder)
    for portion in PORTIONS[file.done :]:
        file.append([record(key) for key in portion])
    return (folder / SAMPLES).read_bytes()


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    whole = filled(tmp_path)
    saved = load(tmp_path)
    assert saved.manifest == MANIFEST_OF and saved.problems == tuple(PROBLEM_OF)
    assert saved.records == tuple(record(key) for portion in PORTIONS for key in portion)
    assert list(json.loads(whole.splitlines()[0])) == [
        *("set", "index", "sample", "response", "answer", "score", "tokens", "finish_reason")
    ]


def test_cut_anywhere_it_goes_on_to_the_same_file(tmp_path: Path) -> None:
    """A kill in the middle of a write leaves any number of bytes."""
    whole = filled(tmp_path)
    lines = whole.splitlines(keepends=True)
    borders = [0, sum(map(len, lines[:4])), sum(map(len, lines[:6])), len(whole)]
    near = {border + i for border in borders for i in (-2, -1, 0, 1, 2)} & set(range(len(whole) + 1))
    for size in sorted(near | set(range(0, len(whole), 61))):
        (tmp_path / SAMPLES).write_bytes(whole[:size])
        file = opened(tmp_path)
        assert file.done == sum(border <= size for border in borders[1:])
        assert (tmp_path / SAMPLES).stat().st_size == borders[file.done]
        assert file.left == sum(map(len, PORTIONS[file.done :]))
        assert filled(tmp_path) == whole


def test_sets_with_samples_of_their_own_are_read_back(tmp_path: Path) -> None:
    """A file that holds as many completions in all, but not of each set, is not whole."""
    (tmp_path / "other").mkdir()
    for folder, own in ((tmp_path, {"a": 2, "b": 2}), (tmp_path / "other", {"a": 1, "b": 5})):
        RecordFile(folder, EvaluationManifest(model="m", samples=own, facts={}), PROBLEM_OF, PORTIONS)
        (folder / SAMPLES).write_text("".join(format_line(record(key)) for some in PORTIONS for key in some))
    assert len(load(tmp_path).records) == 8
    with pytest.raises(InputError, match="has 8 of 8 completions"):
        load(tmp_path / "other")


@pytest.mark.parametrize("missing", [MANIFEST, SAMPLES])
def test_a_kill_between_the_first_files(tmp_path: Path, missing: str) -> None:
    whole = filled(tmp_path)
    (tmp_path / missing).unlink()
    if missing == MANIFEST:
        with pytest.raises(InputError, match=r"has samples\.jsonl but no manifest\.json"):
            opened(tmp_path)
        return
    assert opened(tmp_path).done == 0 and filled(tmp_path) == whole


def test_results_of_something_else_are_refused(tmp_path: Path) -> None:
    whole, facts = filled(tmp_path), dict(MANIFEST_OF.facts)
    for other, told in (
        (facts | {"seed": 2}, "seed: 1 -> 2"),
        ({"seed": 1, "stop": [12]}, "data sha256: x -> None"),
        (facts | {"top_p": 1.0}, "top_p: None -> 1.0"),
    ):
        with pytest.raises(InputError, match=told):
            opened(tmp_path, EvaluationManifest(model="m", samples=2, facts=other))
        assert (tmp_path / SAMPLES).read_bytes() == whole
    elsewhere = EvaluationManifest(model="elsewhere/m", samples=2, facts=MANIFEST_OF.facts)
    assert opened(tmp_path, elsewhere).left == 0, "its name is no fact"


DAMAGES: list[tuple[Callable[[list[bytes]], list[bytes]], int]] = [
    (lambda lines: lines[1:], 1),
    (lambda lines: [lines[0], *lines], 2),
    (lambda lines: [*lines, lines[-1]], 9),
    (lambda lines: [lines[0], b"{}\n", *lines[2:]], 2),
    (lambda lines: [lines[0], lines[1][:9] + b"\n", *lines[2:]], 2),
    (lambda lines: [b"[]\n", *lines[1:]], 1),
    (lambda lines: [lines[0].replace(b"0.1", b'"x"'), *lines[1:]], 1),
]


@pytest.mark.parametrize(("damage", "line"), DAMAGES)
def test_a_changed_file_is_refused(
    tmp_path: Path, damage: Callable[[list[bytes]], list[bytes]], line: int
) -> None:
    changed = b"".join(damage(filled(tmp_path).splitlines(keepends=True)))
    (tmp_path / SAMPLES).write_bytes(changed)
    with pytest.raises(InputError, match=rf"samples\.jsonl:{line}: "):
        opened(tmp_path)
    assert (tmp_path / SAMPLES).read_bytes() == changed


def manifest(samples: object) -> bytes:
    return json.dumps({"model": "m", "samples": samples, "facts": {}}).encode()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        *((text, "not the manifest of an evaluation") for text in (b"", b"[]", b"{}", b"\xff", manifest(0))),
        *((manifest(of), "not the manifest of an evaluation") for of in ({"a": 2, "b": 0}, {"a": "2"}, [2])),
        (manifest({"a": 2}), "no samples of set 'b'"),
        (manifest({}), "no samples of set 'a'"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, content: bytes, told: str) -> None:
    filled(tmp_path)
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(InputError, match=rf"manifest\.json: {told}"):
        load(tmp_path)


def test_only_the_next_portion_is_written_and_only_while_the_folder_is_ours(tmp_path: Path) -> None:
    def lost() -> None:
        raise TrainingError("another job has it")

    file, first = opened(tmp_path), [record(key) for key in PORTIONS[0]]
    for portion in ([record(key) for key in PORTIONS[1]], first[::-1]):
        with pytest.raises(ValueError, match="portion 0"):
            file.append(portion)
    with pytest.raises(TrainingError, match="another job"):
        RecordFile(tmp_path, MANIFEST_OF, PROBLEM_OF, PORTIONS, check=lost).append(first)
    assert (tmp_path / SAMPLES).read_bytes() == b""
    (tmp_path / SAMPLES).unlink()
    (tmp_path / SAMPLES).symlink_to("/dev/full")
    with pytest.raises(TrainingError, match="No space left"):
        file.append(first)


def test_what_is_not_finished_is_not_loaded(tmp_path: Path) -> None:
    whole = filled(tmp_path)
    (tmp_path / SAMPLES).write_bytes(whole[:-1])
    with pytest.raises(InputError, match="has 7 of 8 completions"):
        load(tmp_path)
    with pytest.raises(InputError, match="not an evaluation"):
        load(tmp_path / "none")


def prompt(**changed: object) -> Prompt:
    return Prompt(**{"index": 0, "token_ids": (1, 2), "text": "^4=", "answer": "4"} | changed)  # type: ignore[arg-type]


def test_a_problem_is_its_task_and_answer_not_its_tokens() -> None:
    def name(**changed: object) -> str:
        return Problem.of(prompt(**changed), "s").id

    assert name() == name(index=3, token_ids=(5,)) != name(text="^5=")
    assert name() != name(answer="5")
    row = {"question": "2+2", "level": 1}
    assert name(fields=row) == name(fields=dict(reversed(row.items())), text="<user>2+2") != name()
    assert name(fields=row) != name(fields=row | {"level": 2})


@pytest.mark.parametrize("other", [{"index": 1}, {"token_ids": (1, 3)}, {"answer": "5"}])
def test_the_hash_of_prompts_sees_what_the_model_reads(other: dict[str, object]) -> None:
    assert hash_of_prompts([prompt()]) == hash_of_prompts([prompt()]) != hash_of_prompts([prompt(**other)])
