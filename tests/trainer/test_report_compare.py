"""Several runs on one page."""

import json
import re
from pathlib import Path

import pytest

from megatron_fspo.cli import main
from megatron_fspo.lab.report.compare import names, write_comparison
from megatron_fspo.lab.report.figures import TAIL, WINDOW
from megatron_fspo.lab.report.history import clip_rates, read_records
from report_runs import job, make_config, read_page, write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    one = make_config(folder, run={"name": "one"})
    other = make_config(folder, run={"name": "other", "seed": 7}, loss={"name": "rloo"})
    high = {"val/held_out/mean@4/high": 0.9}
    return (
        write_run(one, steps=6, evaluations={0: 0.25, 6: 0.5}, extra=high),
        write_run(other, steps=4, evaluations={0: 0.5}),
    )


def test_the_page_has_both_runs(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--compare", *map(str, runs)]) == 0
    path = runs[0].parent / "one.compare" / "index.html"
    assert capsys.readouterr().out == f"{path}\n"
    page = read_page(path)
    assert len(page.pictures) == 8 and page.loads_nothing
    shown = page.figures["Reward"]["layer"][-1]["params"][1]
    assert shown["bind"] == "legend" and shown["value"] == [{"line": "A fspo"}, {"line": "B rloo"}]
    text = path.read_text(encoding="utf-8")
    rows = dict(re.findall(r'<th scope="row">(.*?)</th>(.*?)</tr>', text))
    cells = {name: re.findall(r"<td>(.*?)</td>", row) for name, row in rows.items()}
    assert cells["Evaluation, last"] == ["0.500 [0.100, 0.900]", "0.500"]
    assert cells["Reward"] == ["0.040", "0.025"]
    assert all(re.fullmatch(r"\d\.\d+ \[.*, .*\], by chance \d\.\d+", cell) for cell in cells["LRE pooled"])
    assert cells["… of FSPO’s band"] == ["0.5", "–"]
    assert cells["loss.name"] == ["fspo", "rloo"]
    assert cells["run.seed"][1] == "7" and cells["loss.c_low"] == ["0.03", "–"]
    assert "run.name" not in cells and "optimizer.lr" not in cells

    # It begins with what the first picture says.
    lead, *rest = re.findall(r'<p class="(?:lead|hint)">(.*?)</p>', text.partition("<h2>")[0])
    assert text.index(lead) < text.index('id="by_length"') < text.index("<table")
    bins = [clip_rates(read_records(run).tail(TAIL, WINDOW)) for run in runs]
    ratios = [f"{one[-1].out_of_band / one[0].out_of_band:.1f}" for one in bins]
    assert re.findall(r"(\d+\.\d) ×", lead) == ratios
    assert not any("not matched" in line for line in rest)


def test_shares_that_differ_are_said(tmp_path: Path) -> None:
    folders = []
    for name, scale in (("a", 0.5), ("b", 0.1)):
        folder = write_run(make_config(tmp_path, run={"name": name}), steps=6)
        rows = [json.loads(line) for line in (folder / "sequences.jsonl").read_text().splitlines()]
        for row in rows:
            pairs = list(zip(row["log_ratio_sum"], row["length"], strict=True))
            row["log_ratio_sum"] = [scale * s * length**0.5 for s, length in pairs]
            row["out_of_band"] = [scale * abs(s) > 0.03 for s, _ in pairs]
        (folder / "sequences.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        folders.append(folder)
    path = tmp_path / "pages" / "both.html"
    assert write_comparison(folders, path) == path and [*path.parent.iterdir()] == [path]
    text = path.read_text(encoding="utf-8").partition("<h2>")[0]
    assert "not matched" in text


def test_equal_names_are_told_apart() -> None:
    paths = [Path("/a/x/demo"), Path("/b/x/demo"), Path("/b/x/other")]
    assert names(paths) == ["a/x/demo", "b/x/demo", "b/x/other"]
    assert names([Path("/a/one"), Path("/a/two")]) == ["one", "two"]


def test_what_cannot_be_compared(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    begun = write_run(make_config(tmp_path, run={"name": "begun"}), steps=0, evaluations={0: 0.5})
    capsys.readouterr()
    one, other = map(str, runs)
    for words, said in (
        (["--compare", one], "name two runs or more"),
        (["--compare", one, other, f"{one}/../one"], f"{one} is there twice"),
        (["--compare", one, str(tmp_path / "empty")], f"{tmp_path / 'empty'}: holds no metrics.jsonl"),
        (["--compare", one, str(begun)], f"{begun}: has made no step"),
        ([one, "--out", "x"], "--out needs --compare"),
        ([], "name the folder of a run"),
    ):
        assert main(["report", *words]) != 0
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and said in lines[0], lines


def test_a_hostile_folder_name_is_escaped(runs: tuple[Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "<img src=x onerror=alert(1)>$_{"
    folder.mkdir()
    for name in ("config.toml", "metrics.jsonl"):
        (folder / name).write_bytes((runs[0] / name).read_bytes())
    (folder / "jobs.jsonl").write_text(json.dumps(job(0, device="<b>GPU")) + "\n")
    page = read_page(write_comparison([runs[1], folder], tmp_path / "page.html"))
    assert page.loads_nothing
    assert folder.name in page.text and "2 processes × <b>GPU" in page.text
