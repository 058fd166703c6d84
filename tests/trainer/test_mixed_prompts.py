"""A run of several files."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import REPO
from megatron_fspo.config.loading import load_config
from megatron_fspo.errors import InputError
from megatron_fspo.job.consistency import facts
from megatron_fspo.trainer.prepare import Inputs, prepare


def read(folder: Path, prompts: int) -> Inputs:
    """The make-sum example with its training prompts in two files, the first of 20 prompts, and two
    evaluation sets."""
    lines = (REPO / "examples/make_sum/train.jsonl").read_text().splitlines(keepends=True)
    (folder / "a.jsonl").write_text("".join(lines[:20] + lines[:3]))
    (folder / "b.jsonl").write_text("".join(lines[20:]))
    words = f"--model.checkpoint={REPO}/examples/make_sum/checkpoint --parallel.tensor=1 "
    words += f"--parallel.sequence=false --rollout.prompts={prompts} "
    words += "--data.train=[{file='a.jsonl',weight=1},{file='b.jsonl',weight=3}] "
    words += "--data.validation=[{file='a.jsonl',name='first'},{file='b.jsonl'}]"
    return prepare(load_config(REPO / "examples/make_sum/run.toml", words.split()), world_size=1)


def test_a_run_of_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inputs = read(tmp_path, prompts=16)
    assert [prompt.index for prompt in inputs.train] == list(range(68))
    assert [prompt.dataset for prompt in inputs.train] == ["a"] * 20 + ["b"] * 48
    assert [prompt.dataset for prompt in inputs.validation] == ["first"] * 20 + ["b"] * 48
    assert [prompt.index for prompt in inputs.validation] == list(range(68))
    note = "a.jsonl: 20 prompts of 23 rows; left out: 3 with the prompt and answer of an earlier row"
    assert inputs.notes == (note, note)
    named = {fact for fact in facts(inputs.config, trains=True) if fact.startswith("the file of data")}
    assert named == {f"the file of data.{key}, {x}.jsonl," for key in ("train", "validation") for x in "ab"}
    with pytest.raises(InputError, match=r"prompts = 64, up to 49 of them of b, but b\.jsonl has only 48"):
        read(tmp_path, prompts=64)
