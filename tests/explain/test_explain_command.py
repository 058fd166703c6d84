"""``megatron-fspo explain`` as a person calls it: what it prints and writes, how fast, without Megatron."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import torch

from dumps import LIMITS, RECORDED, token_rows, walks, write
from launch import python
from megatron_fspo.cli import main
from megatron_fspo.lab.explain.command import explain
from megatron_fspo.lab.explain.losses import BAND_LOSSES
from report_runs import read_page

RUN = str(RECORDED / "fspo.sequences.jsonl")


def test_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", RUN, "--step", "2", *LIMITS["fspo"]]) == 0
    out = capsys.readouterr().out
    # The run's own fspo/out_of_band.
    assert re.search(r"^fspo +c_low = 0.06, c_high = 0.06 +40.0%", out, re.MULTILINE)
    assert "nan" not in out
    assert main(["explain", RUN, "--json", "--rate", "0.2"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    names = [loss.name for loss in BAND_LOSSES if loss.band() is not None]
    assert [one["name"] for one in found["given"]] == names and names[:3] == ["fspo", "gspo", "rloo"]
    assert found["rate"] == 0.2
    assert [round(one["out_of_band"], 2) for one in found["matched"]] == [0.2] * len(names)
    assert found["responses"] == 112 and len(found["words"]) == 4


def test_rows_with_tokens_have_ctpo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = write(tmp_path / "a.jsonl", token_rows(200))
    assert main(["explain", str(dump), "--ctpo.c-low", "0.03", "--out", str(tmp_path / "out")]) == 0
    assert "c_low = 0.03, c_high = 0.05" in capsys.readouterr().out
    pairs = json.loads((tmp_path / "out/explain.json").read_text(encoding="utf-8"))["disagreements"]
    of_tokens = {loss.name for loss in BAND_LOSSES if loss.band() is None}
    assert of_tokens == {"ctpo", "cppo", "pnpo"}
    assert all(one["in_part"] == 0 for one in pairs if one["clipped_by"] not in of_tokens)
    assert all(0 < one["in_part"] <= one["responses"] for one in pairs if one["clipped_by"] == "ctpo")
    outcomes = map(json.loads, (tmp_path / "out/outcomes.jsonl").read_text(encoding="utf-8").splitlines())
    assert {one["outcome"]["ctpo"] for one in outcomes} == {"kept", "in part", "no advantage"}


def test_the_page_and_the_fate_of_each_response(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = walks(500)
    dump = write(tmp_path / "<img src=x>.jsonl", rows)
    assert main(["explain", str(dump), "--out", str(tmp_path / "out")]) == 0
    assert "out/index.html" in capsys.readouterr().out
    page = read_page(tmp_path / "out/index.html")
    assert page.loads_nothing and len(page.pictures) == 5
    figures = json.loads((tmp_path / "out/explain.json").read_text(encoding="utf-8"))
    assert all(sentence in page.text for sentence in figures["words"])
    outcomes = [json.loads(line) for line in (tmp_path / "out/outcomes.jsonl").read_text().splitlines()]
    assert [one["row"] for one in outcomes] == list(range(1, 501))
    assert [one["length"] for one in outcomes] == [row["length"] for row in rows]
    pairs = {(one["kept_by"], one["clipped_by"]): one["responses"] for one in figures["disagreements"]}
    kept_by_rloo = sum(
        (one["outcome"]["rloo"], one["outcome"]["fspo"]) == ("kept", "clipped") for one in outcomes
    )
    assert kept_by_rloo == pairs["rloo", "fspo"] > 0


def test_dumps_without_a_rate_or_a_fate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, rows, said in (
        ("inside", walks(200, sigma=1e-6), "give one, such as --rate 0.1"),
        ("alike", [{**row, "advantage": 0} for row in walks(200)], "No response changes its outcome"),
    ):
        dump = write(tmp_path / f"{name}.jsonl", rows)
        assert main(["explain", str(dump), "--out", str(tmp_path / name)]) == 0
        out = capsys.readouterr().out
        assert said in out and "nan" not in out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--fspo.c-high", "wide"], "--fspo.c_high wide: Input should be a valid number"),
        (["--fspo.c-high"], "--fspo.c-high needs a value"),
        (["--fspo.c-dual", "0.01"], "--fspo: loss.c_dual = 0.01 is less than loss.c_high"),
        (["--fspo.calibrate", "4"], "--fspo.calibrate: no such limit; it has c_low, c_high, exponent"),
        (["--ppo.eps", "1"], "unexpected argument '--ppo.eps'"),
        (["--rate", "0.0001"], "--rate 0.0001: of 112 responses, it must leave at least one on each side"),
        (["--fields", "size=n"], "--fields size=n: must be FIELD=NAME"),
        (["--fields", "length=n"], "fspo.sequences.jsonl:1: no field 'n', which --fields gives for length"),
        (["--out", RUN], "is there and is no folder"),
    ],
)
def test_wrong_arguments(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", RUN, *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and line in err and err.count("\n") == 1


def test_a_hundred_thousand_responses(tmp_path: Path) -> None:
    """In ten seconds, of one thread: on a busy machine several would spin."""
    dump = write(tmp_path / "a.jsonl", walks(100_000, longest=4000))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        began = time.process_time()
        found = explain(dump, [], [], step=None, rate=None)
    finally:
        torch.set_num_threads(threads)
    assert time.process_time() - began < 10
    assert len(found.dump) == 100_000


def test_explain_and_plan_need_no_megatron(tmp_path: Path) -> None:
    explain = ["explain", str(write(tmp_path / "a.jsonl", walks(100))), "--out", str(tmp_path / "out")]
    plan = "plan --config examples/qwen3_8b/run.toml --model qwen3-8b --nproc 8".split()
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['megatron', 'transformer_engine', 'transformers']));"
        f"from megatron_fspo.cli import main; sys.exit(main({explain}) or main({plan}))"
    )
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/index.html").exists() and "the run fits" in done.stdout
