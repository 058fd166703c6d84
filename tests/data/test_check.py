"""``megatron-fspo data check``: what it finds, its exit status, and its one line for wrong words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from launch import REPO
from megatron_fspo.cli import main
from megatron_fspo.data.tasks import gradable

SAMPLES = Path(__file__).with_name("samples")
MAKE_SUM = "examples/make_sum/run.toml"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)


def check(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    status = main(["data", "check", *map(str, words)])
    out, err = capsys.readouterr()
    assert err == ""
    return status, out


def found(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    status, out = check(capsys, *words, "--json")
    (one,) = json.loads(out)
    return status, one


def test_a_faulty_file(capsys: pytest.CaptureFixture[str]) -> None:
    path = SAMPLES / "faulty.jsonl"
    status, one = found(capsys, path, "--preset", "gsm8k")
    assert (status, one["fine"], one["rows"], one["prompts"], one["duplicates"]) == (1, False, 8, 5, 1)
    assert one["conflicts"] == {"count": 1, "first": [f"{path}:4: '4.5', but '18' at {path}:3"]}
    assert one["broken"]["count"] == 2
    assert [text[: len(str(path)) + 2] for text in one["broken"]["first"]] == [f"{path}:5", f"{path}:6"]
    assert one["ungradable"] == {"count": 1, "first": [f"{path}:7: 'answer' is '×'"]}
    assert "too_long" not in one, "that takes a tokenizer"
    assert sum(count for _, _, count in one["length"]["histogram"]) == 5
    assert [text.partition(",")[0] for text in one["rendered"]] == [f"{path}:{n}" for n in (1, 3, 4)]


def test_the_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    _, out = check(capsys, SAMPLES.relative_to(REPO) / "faulty.jsonl", "--preset", "gsm8k")
    assert out in (REPO / "docs/data.md").read_text(encoding="utf-8")


def test_the_files_of_a_run_in_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = check(capsys, "--config", MAKE_SUM, "--json")
    train, validation = json.loads(out)
    assert status == 0
    assert (train["prompts"], validation["prompts"]) == (68, 9)
    assert train["length"] == {"unit": "tokens", "min": 4, "median": 4, "max": 4, "histogram": [[4, 7, 68]]}
    assert train["rendered"][0].endswith("^03=")
    assert "samples" not in train and validation["samples"] == 64


def test_samples_of_the_evaluation_sets_of_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Also where a training set has the name of an evaluation set."""
    layer, folder = tmp_path / "layer.toml", "examples/make_sum"
    layer.write_text(
        f"[data]\ntrain = '{folder}/train.jsonl'\nvalidation = [{{file = '{folder}/validation.jsonl', "
        f"name = 'train', samples = 5}}, {{file = '{folder}/train.jsonl', name = 'more'}}]"
    )
    words = ("--config", MAKE_SUM, "--config", layer)
    found = json.loads(check(capsys, *words, "--json")[1])
    assert [one.get("samples") for one in found] == [None, 5, 64]
    samples = re.findall(r"^  samples +(\d+)   responses to", check(capsys, *words)[1], flags=re.MULTILINE)
    assert samples == ["5", "64"]


def test_too_long_prompts_are_counted_in_tokens(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(Path(MAKE_SUM).read_text().replace("max_prompt_tokens = 4", "max_prompt_tokens = 3"))
    file = "examples/make_sum/validation.jsonl"
    status, one = found(capsys, file, "--config", config)
    assert (status, one["too_long"]["count"]) == (1, 9)
    assert one["too_long"]["first"][0] == f"{file}:1: 4 tokens, max_prompt_tokens is 3"
    config.write_text(config.read_text().replace("[data]", '[data]\ntoo_long = "drop"'))
    assert found(capsys, file, "--config", config)[0] == 0


def test_a_tokenizer_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    file, folder = "examples/make_sum/train.jsonl", "examples/make_sum/checkpoint"
    assert found(capsys, file, "--tokenizer", folder)[1]["length"]["unit"] == "tokens"
    assert main(["data", "check", file, "--tokenizer", folder, "--preset", "slime"]) == 2
    assert "chat_template is true, but the tokenizer has no chat template" in capsys.readouterr().err


def test_parquet(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"What is {n} + {n}?"}],
            "reward_model": {"ground_truth": str(2 * n)},
        }
        for n in (1, 2, 2, 3)
    ]
    path = tmp_path / "dapo.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    status, one = found(capsys, path, "--preset", "dapo")
    assert (status, one["prompts"], one["duplicates"]) == (0, 3, 1)
    assert one["rendered"][0] == f"{path}: row 1, answer '2'\n<user> What is 1 + 1?"


def test_responses_of_a_supervised_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Shown, and as long as the run would allow."""
    rows = [{"prompt": "^17=", "completion": text} for text in ("5", "5555")]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = [
        "[run]\nsteps = 1\n[model]",
        f"checkpoint = '{REPO}/examples/make_sum/checkpoint'\n[loss]\nname = 'sft'\n[data]",
        f"train = '{tmp_path}/x.jsonl'\npreset = 'completion'\n[rollout]\nprompts = 1",
        "max_response_tokens = 4",
    ]
    (tmp_path / "run.toml").write_text("\n".join(run))
    status, one = found(capsys, "--config", tmp_path / "run.toml")
    named = f"{tmp_path}/x.jsonl:2: the response has 5 tokens, rollout.max_response_tokens is 4"
    assert (status, one["too_long"]) == (1, {"count": 1, "first": [named]})
    assert "response '5" in one["rendered"][0]


def test_a_file_of_broken_rows_is_no_good(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("[]\n" * 5)
    status, one = found(capsys, path)
    assert (status, one["prompts"], one["broken"]["count"], len(one["broken"]["first"])) == (1, 0, 5, 3)
    assert check(capsys, path)[0] == 1


def test_gradable() -> None:
    answers = ("4", "½", "\\pi", "", " ", "×", "7" * 1000, "7" * 1001)
    assert [gradable(answer) for answer in answers] == [True] * 3 + [False] * 3 + [True, False]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("data", ["required: action"]),
        ("data check", ["--config"]),
        ("data check --preset gsm9k {tmp}/x", ["--preset", "'gsm9k'", "gsm8k"]),
        ("data check {tmp}/none.jsonl", ["none.jsonl: cannot read"]),
        ("data check {tmp}/empty", ["{tmp}/empty: holds no prompts"]),
        ("data check {tmp}/x.parquet", ["x.parquet: not parquet"]),
        ("data check {tmp}/x --tokenizer {tmp}/none", ["{tmp}/none: no such folder"]),
        ("data check {tmp}/x --config {tmp}/none.toml", ["none.toml: cannot be read"]),
        ("data check {tmp}/x --data.preset gsm8k", ["unrecognized arguments: --data.preset"]),
    ],
)
def test_wrong_words(line: str, told: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("x", "empty", "x.parquet"):
        (tmp_path / name).write_text('{"prompt": "a", "answer": "1"}' if name != "empty" else "")
    before = sorted(tmp_path.rglob("*"))
    try:
        status: object = main(line.format(tmp=tmp_path).split())
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert re.fullmatch(r"megatron-fspo( \w+){0,2}: [^\n]+\n", err), err
    assert [words for words in told if words.format(tmp=tmp_path) not in err] == [], err
    assert sorted(tmp_path.rglob("*")) == before
