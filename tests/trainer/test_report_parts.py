"""What the report says of the time, the machine, the responses and the exponent."""

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fspo.lab.report import drawing, pictures
from megatron_fspo.lab.report.figures import exponent_of, machines, phases
from megatron_fspo.lab.report.history import History, Series, pooled_lre
from megatron_fspo.lab.report.page import write_report
from megatron_fspo.lab.report.samples import SHOWN, before_after, shortened
from megatron_fspo.mcore.backend import choose_backend
from megatron_fspo.record.log import RunLog, read_rows
from megatron_fspo.trainer import prepare as machine_module
from megatron_fspo.trainer.prepare import cpu_name, machine
from report_runs import make_config, read_page, records_from, table, write_run


def job(step: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": step,
        "processes": 2,
        "device": "CPU",
        "cpu": "Model X",
        "cores": 8,
        "layers": "local",
        "versions": {"Python": "3.12", "torch": "2.9"},
    } | changes


def test_where_the_time_went_by_hand(tmp_path: Path) -> None:
    times = {"timing_s/gen": 30.0, "timing_s/update_actor": 24.0, "timing_s/testing": 20.0}
    run = write_run(make_config(tmp_path), steps=4, off_policy=False, extra=times)
    found = phases(History(run))
    assert [(one.name, one.seconds, one.between) for one in found] == [
        ("sampling, grading", 30.0, False),
        ("update", 24.0, False),
        ("the rest", 6.0, False),
        ("evaluation", 20.0, True),
    ]
    assert [one.share for one in found] == [0.375, 0.3, 0.075, 0.25]
    text = read_page(write_report(run)).text
    assert "Where the time went" in text and "37.5%" in text


def test_machines_are_told_once() -> None:
    assert machines([]) == {}
    same = machines([job(0), job(3)])
    assert same["Hardware"] == "2 processes on Model X, 8 cores on the first machine"
    assert same["Versions"] == "Python 3.12, torch 2.9"
    moved = machines([job(0), job(3, processes=1, device="GPU Y")])
    assert moved["Hardware"].endswith(
        "; from step 4: 1 process × GPU Y; Model X, 8 cores on the first machine"
    )
    assert moved["Versions"] == same["Versions"]


def test_a_job_records_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module.dist, "get_world_size", lambda: 2)
    found = machine(choose_backend("cpu", "local"))
    assert found["processes"] == 2 and found["device"] == "CPU" and found["cpu"]
    assert {"Python", "torch", "megatron-fspo"} <= found["versions"].keys()
    config = make_config(tmp_path)
    config.run_folder.mkdir(parents=True)
    for step in (None, 3, 1):
        RunLog(config, writer=True, resume_step=step).job(step or 0, found)
    rows = list(read_rows(config.run_folder / "jobs.jsonl"))
    assert [row["step"] for row in rows] == [0, 1], "those after the step that the job goes on from are gone"
    assert machines(rows)["Versions"].startswith("Python 3.")


def test_the_name_of_a_cpu() -> None:
    assert (
        cpu_name("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz \nmodel name\t: another\n")
        == "Some CPU @ 2 GHz"
    )
    assert cpu_name("model name :\n") != ""


def rows(step: int, *given: tuple[str, str, float]) -> list[dict[str, Any]]:
    return [{"step": step, "prompt": p, "response": r, "reward": reward} for p, r, reward in given]


def test_responses_that_changed_come_first() -> None:
    first = rows(0, ("p", "a", 0.0), ("q", "b", 1.0), ("r", "c", 1.0), ("p", "d", 0.0), ("gone", "", 0.0))
    middle = rows(2, ("p", "?", 1.0))
    last = rows(4, ("p", "A", 0.0), ("q", "B", 1.0), ("r", "C", 0.0), ("p", "D", 1.0))
    found = before_after([*first, *middle, *last])
    assert found is not None
    assert (found.first, found.last, found.kept, found.better, found.worse) == (0, 4, 4, 1, 1)
    shown = [(one.prompt, one.before.response, one.after.response) for one in found.shown]
    assert shown == [("r", "c", "C"), ("p", "d", "D"), ("q", "b", "B"), ("p", "a", "A")]
    assert before_after(first) is None and before_after([]) is None
    assert before_after([*first, *rows(4, ("new", "", 0.0))]) is None
    many = [row for step in (0, 1) for row in rows(step, *((str(n), "x", 0.0) for n in range(30)))]
    assert len(before_after(many).shown) == SHOWN  # type: ignore[union-attr]


def test_long_texts_keep_both_ends() -> None:
    assert shortened("short", 30) == "short"
    assert shortened("a" * 1000 + "b" * 1020, 30) == f"{'a' * 20} [… 1,990 characters …] {'b' * 10}"
    assert shortened("\ud83d", 30) == "?"


def test_responses_on_the_page_are_escaped(tmp_path: Path) -> None:
    run = write_run(make_config(tmp_path), steps=2, off_policy=False)
    attack = "<script>alert(1)</script></pre>{{ 7 * 7 }}\ud83d"
    both = [*rows(0, ("p", attack, 0.0)), *rows(2, ("p", "fine", 1.0))]
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in both))
    page = read_page(write_report(run))
    assert "script" not in {tag for tag, _ in page.tags}
    assert "<script>alert(1)</script></pre>{{ 7 * 7 }}?" in page.text
    assert "reward 0 → 1" in page.text and "1 had a higher reward afterwards and 0 a lower one" in page.text


def test_the_exponent_has_an_interval_or_a_reason(tmp_path: Path) -> None:
    run = write_run(make_config(tmp_path), steps=20)
    path = write_report(run)
    _, value, note = table(path)["Exponent of S"]
    low, high = map(float, re.search(r"interval (\S+) to (\S+) over", note).groups())  # type: ignore[union-attr]
    assert note.endswith("; the band has 0.5")
    assert low < float(value) < high and low < 0.5 < high, "S is a random walk there"
    assert "Green: over all steps" in read_page(path).text
    alike = records_from([5] * 8, [False] * 8, [False] * 8, [1.0] * 8, sums=[0.1] * 8)
    assert exponent_of(alike) == "1 independent groups of sequences; an interval needs 3"


def test_settings_are_drawn_in_steps() -> None:
    steps, values = np.arange(1, 41), np.array([0.03] * 20 + [0.05] * 20)
    line = drawing.Line(
        series=Series(steps=steps, values=values), label="c", colour=drawing.ORANGE, held=True
    )
    smooth = drawing.Line(series=line.series, label="c", colour=drawing.ORANGE)
    held, climbed = (pictures.small([one], "c") for one in (line, smooth))
    (path,) = re.findall(r'<path d="([^"]*)"[^>]*stroke: #d55e00[^>]*stroke-width: 1.6', held)[:1]
    points = [tuple(map(float, one)) for one in re.findall(r"[ML] (\S+) (\S+)", path)]
    assert len({y for _, y in points}) == 2, "two levels, and nothing between them"
    assert all(a[0] == b[0] or a[1] == b[1] for a, b in pairwise(points))
    assert len(re.findall(r"L ", climbed)) > len(re.findall(r"L ", held))


def test_the_pooled_error_stands_beside_its_own_null() -> None:
    lengths, outside = [5] * 40 + [50] * 40, [False] * 40 + [True, False] * 20
    found = pooled_lre(records_from(lengths, outside, [False] * 80, [1.0] * 80))
    assert math.isfinite(found.null_mean)
    svg = pictures.length_error([], found)
    assert ">pooled<" in svg and "stroke-dasharray" in svg


def test_text_and_axes_follow_the_page() -> None:
    svg = pictures.small(
        [drawing.Line(series=Series(steps=np.arange(3), values=np.ones(3)), label="x", colour=drawing.BLUE)],
        "y",
    )
    assert "var(--figure-text, #374151)" in svg and "var(--figure-grid, #e5e7eb)" in svg
    assert not re.findall(r"(?:fill|stroke): #(?:000000|374151|e5e7eb|9ca3af|111827)", svg)
    for text in re.findall(r"<text[^>]*>", svg):
        assert "fill: var(--figure-text" in text, text
