"""Evaluations of the committed make-sum model: portions; killed and resumed; two ranks; compared; refused."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launch import REPO, environment, forked, why
from megatron_fspo.config.loading import load_config
from megatron_fspo.trainer.evaluate import num_responses, portions
from megatron_fspo.trainer.evaluate_checkpoint import hash_of_checkpoint
from megatron_fspo.trainer.prepare import Inputs
from megatron_fspo.types import Prompt

MODEL = REPO / "examples/make_sum/checkpoint"
DATA = REPO / "examples/make_sum/validation.jsonl"
FILES = ("manifest.json", "problems.jsonl", "samples.jsonl", "results.json", "table.md")
SMALL = "--samples 16 --max-response-tokens 100 --rollout.max-batch 32".split()


def words(out: Path, *more: str, data: Sequence[Path] = (DATA,)) -> list[str]:
    flags = ["--model", str(MODEL), "--data", *map(str, data), "--reward", "make_sum", "--out", str(out)]
    return ["-m", "megatron_fspo", "evaluate", *flags, *SMALL, *more]


def run(out: Path, *more: str, nproc: int = 0, data: Sequence[Path] = (DATA,)) -> str:
    """What it prints."""
    done = forked(words(out, *more, data=data), nproc=nproc)
    assert done.returncode == 0, why(done.stderr)
    return done.stdout


def refusal(out: Path, *more: str, data: Sequence[Path] = (DATA,)) -> str:
    done = forked(words(out, *more, data=data), nproc=0)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluation that nothing disturbed."""
    out = tmp_path_factory.mktemp("evaluations") / "whole"
    run(out)
    return out


@pytest.mark.slow
def test_what_is_left(whole: Path) -> None:
    assert sorted(contents(whole)) == sorted(FILES)
    found = rows(whole)
    assert [(row["set"], row["index"], row["sample"]) for row in found] == [
        ("validation", i, n) for i in range(9) for n in range(16)
    ]
    results = json.loads((whole / "results.json").read_text())
    mean = results["sets"]["validation"]["mean"]
    assert mean["value"] == pytest.approx(sum(row["score"] for row in found) / len(found))
    assert 0.3 < mean["low"] < mean["value"] < mean["high"] < 0.9
    answers = [json.loads(line)["answer"] for line in (whole / "problems.jsonl").read_text().splitlines()]
    for row in found:
        text = row["response"]
        assert row["tokens"] == len(text) + (row["finish_reason"] == "stop")
        right = sum(map(int, text[::3] if text.isdigit() else "")) == int(answers[row["index"]])
        assert not row["score"] or (right and row["finish_reason"] == "stop")


def killed(out: Path) -> bytes:
    """The completions that an evaluation leaves which was killed once it had written some."""
    process = subprocess.Popen(
        [sys.executable, *words(out)], cwd=REPO, env=environment(), stdout=subprocess.DEVNULL
    )
    deadline, samples = time.monotonic() + 120, out / "samples.jsonl"
    while not samples.exists() or not samples.stat().st_size:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return samples.read_bytes()


@pytest.mark.slow
def test_killed_and_resumed_it_is_the_same(whole: Path, tmp_path: Path) -> None:
    """kill -9 in the middle, then a line cut short, as a kill in a write leaves it."""
    for attempt in range(5):  # on a busy machine the kill may come after the end
        out = tmp_path / str(attempt)
        before = killed(out)
        if not (out / "results.json").exists() and before.count(b"\n") < 144:
            break
    complete = (whole / "samples.jsonl").read_bytes()
    assert 0 < before.count(b"\n") < 144 and complete.startswith(before)
    (out / "samples.jsonl").write_bytes(complete[: len(before) + 250])
    table = run(out)
    assert contents(out) == contents(whole)
    assert table == (whole / "table.md").read_text()


@pytest.mark.slow
def test_what_is_done_is_not_done_again(whole: Path, tmp_path: Path) -> None:
    """Nothing samples: the files would tell, as the kept responses are not this model's."""
    out = Path(shutil.copytree(whole, tmp_path / "done"))
    # A set that says what holds anyway is the same evaluation.
    said = ("--samples", "2", "--data.validation", f"[{{file = '{DATA}', samples = 16}}]")
    text = (out / "samples.jsonl").read_text()
    (out / "samples.jsonl").write_text(text.replace('"score": 1.0', '"score": 0.25'))
    assert run(out, "--json") == run(out, "--json", *said)
    found = json.loads(run(out, "--json"))
    assert 0 < found["val/validation/mean@16"] < 0.25 and found["val/validation/pass@16"] == 0


@pytest.mark.slow
def test_another_evaluation_is_refused(whole: Path, tmp_path: Path) -> None:
    before = contents(whole)
    other = tmp_path / "validation.jsonl"
    other.write_text("".join(DATA.read_text().splitlines(keepends=True)[:-1]))
    copy = Path(shutil.copytree(MODEL, tmp_path / "copy"))
    (copy / "README.md").write_text("a document changes nothing")
    assert hash_of_checkpoint(copy) == hash_of_checkpoint(MODEL)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    for line, told in (
        (refusal(whole, "--rollout.stop", "['9']"), "rollout.stop: None -> ['9']"),
        (refusal(whole, data=(other,)), "validation sha256: "),
        (refusal(whole, "--model.checkpoint", str(copy)), "model.checkpoint sha256: "),
    ):
        assert f"{whole} has the results of another evaluation: {told}" in line
    out = tmp_path / "out"
    line = refusal(out, "--compare", str(whole), data=(other,))
    assert "were evaluated on different problems: only in the second: validation 8 (" in line
    assert not out.exists()
    assert contents(whole) == before


@pytest.mark.slow
def test_several_sets_on_two_ranks_compared(whole: Path, tmp_path: Path) -> None:
    """Each rank grades its prompts, the first one writes those of both in their order."""
    second = tmp_path / "second.jsonl"
    second.write_text("".join(DATA.read_text().splitlines(keepends=True)[2:5]))
    out = tmp_path / "cool"
    files = (DATA, second)
    own = ("--data.validation", f"[{{file = '{DATA}'}}, {{file = '{second}', samples = 6}}]")
    run(out, "--temperature", "0.3", *own, nproc=2, data=files)
    keys = [(row["set"], row["index"], row["sample"]) for row in rows(out)]
    order = [("validation", i) for i in range(9)] + [("second", i) for i in range(9, 12)]
    assert keys == [(name, i, n) for name, i in order for n in range(16 if name == "validation" else 6)]
    warm = tmp_path / "warm"
    run(warm, *own, nproc=2, data=files)
    # What a response is does not hang on ranks or sets, up to the rounding of a float.
    mine, theirs = ([row["response"] for row in rows(folder)[:144]] for folder in (warm, whole))
    assert sum(one == other for one, other in zip(mine, theirs, strict=True)) > 140
    lines = run(out, "--temperature", "0.3", "--compare", str(warm), *own, nproc=2, data=files).splitlines()
    assert any(line.startswith("| difference | +") for line in lines)
    assert "Besides the weights, these settings differ: `evaluation.temperature` 1.0 → 0.3." in lines
    found = json.loads((out / "results.json").read_text())["comparison"]["difference"]
    mean = found["sets"]["validation"]["mean"]
    assert 0 < mean["low"] < mean["value"] < mean["high"]
    assert found["average"]["mean"]["value"] == pytest.approx(
        (mean["value"] + found["sets"]["second"]["mean"]["value"]) / 2
    )


def inputs(samples: int, max_batch: int, sizes: dict[str, int], **own: int) -> Inputs:
    """With prompts of several sets, some with a k of their own, and nothing else that is not looked at."""
    sets = [f"{{file = {name!r}, samples = {own.get(name, samples)}}}" for name in sizes]
    words = f"--rollout.max-batch {max_batch} --data.validation [{','.join(sets)}]".split(maxsplit=3)
    config = load_config(REPO / "examples/make_sum/run.toml", words)
    names = [name for name, size in sizes.items() for _ in range(size)]
    prompts = tuple(
        Prompt(index=i, token_ids=(1,), text="", answer="", dataset=name) for i, name in enumerate(names)
    )
    return Inputs(
        config=config, backend=None, arch=None, tokenizer=None, stop_token_ids=(), train=(),  # type: ignore[arg-type]
        validation=prompts, noise=None,  # type: ignore[arg-type]
    )  # fmt: skip


def test_portions_fill_a_batch_of_every_rank_and_keep_the_order() -> None:
    one = inputs(4, 12, {"a": 7, "b": 2})
    for ranks, sizes in ((1, [3, 3, 1, 2]), (2, [6, 1, 2]), (100, [7, 2])):
        found = portions(one, ranks)
        assert [len(portion.prompts) for portion in found] == sizes
        assert [prompt.index for portion in found for prompt in portion.prompts] == list(range(9))
        assert [key for p in found for key in p.keys] == [
            ("a" if i < 7 else "b", i, n) for i in range(9) for n in range(4)
        ]
    assert [len(p.prompts) for p in portions(inputs(64, 12, {"a": 3}), 1)] == [1, 1, 1]


def test_portions_of_sets_with_a_k_of_their_own() -> None:
    one = inputs(4, 12, {"a": 4, "b": 4}, b=6)
    found = [(p.dataset, len(p.prompts), p.samples, len(p.keys)) for p in portions(one, 1)]
    assert found == [("a", 3, 4, 12), ("a", 1, 4, 4), ("b", 2, 6, 12), ("b", 2, 6, 12)]
    assert num_responses(one) == 40
