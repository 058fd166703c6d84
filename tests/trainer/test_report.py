"""The report of a run: its page, and what it says of time, machine, responses and the exponent."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from megatron_fspo.errors import InputError
from megatron_fspo.lab.report import charts
from megatron_fspo.lab.report.figures import exponent_by_step, machines, phases
from megatron_fspo.lab.report.history import History, Series, pooled_lre, read_records
from megatron_fspo.lab.report.page import write_report
from megatron_fspo.lab.report.samples import browsed, shortened
from megatron_fspo.mcore.machine.backend import choose_backend
from megatron_fspo.record.log import RunLog
from megatron_fspo.record.rows import read_rows
from megatron_fspo.trainer import prepare as machine_module
from megatron_fspo.trainer.prepare import cpu_name, machine
from report_runs import (
    BY_SEQUENCE,
    HEALTH,
    LEARNING,
    RATES,
    Page,
    job,
    make_config,
    read_page,
    records_from,
    table,
    write_run,
)

EVERY = LEARNING | RATES | BY_SEQUENCE | HEALTH


def test_the_page_has_the_numbers_and_pictures_of_the_run_and_loads_nothing(tmp_path: Path) -> None:
    run = write_run(make_config(tmp_path), steps=20, evaluations={0: 0.25, 10: 0.5, 20: 0.75})
    path = write_report(run)
    assert path == run / "report" / "index.html" and [*path.parent.iterdir()] == [path]

    rows = table(path)
    assert rows["Reward"][:2] == ("0.030", "0.180")  # means of .01 … .05 and of .16 … .20
    assert rows["Evaluation"] == ("0.250", "0.750", "held_out/mean@4, at step 0 and step 20")
    assert rows["Response length"][:2] == ("43.0", "58.0")
    assert rows["Outside the band"][:2] == ("1.5%", "9.0%")
    assert rows["LRE (mean)"][:2] == ("0.300", "1.800")
    assert rows["LRE by chance"][:2] == ("0.050", "0.050")
    assert rows["Dropped sequences"][1] == "20"
    assert rows["Throughput"][:2] == ("3,000", "18,000")
    assert rows["Steps"] == ("", "20 of 20", "20 min 00 s, without evaluations and checkpoints")
    pool = pooled_lre(read_records(run))
    low, high = pool.mean_interval
    assert rows["LRE pooled"][1:] == (
        f"{pool.mean:.3f}",
        f"95% interval {low:.3f} to {high:.3f}; null floor {pool.null_mean:.3f}; "
        "1,280 records, evenly over all steps",
    )

    page = read_page(path)
    assert page.pictures == EVERY and page.loads_nothing
    rewards, held = (rows_of(page, title) for title in ("Reward", "Noise σ̂ and width c"))
    assert rewards["training"][4] == {"x": 5, "y": 0.05, "low": 0.0, "high": 0.1, "kind": charts.SMOOTHED}
    assert [row["y"] for row in rewards["evaluation, mean@4"]] == [0.25, 0.5, 0.75]
    assert {row["kind"] for row in held["c low"]} == {charts.HELD}
    assert json.dumps(page.figures).count("http") == 0
    for words in (
        "the first and the last 5 of 20 steps",
        "c = 0.03 (low), 0.04 (high)",
        "some/model, float32",
        "parallel.sequence true",
        "320 records of steps 16 to 20",
        "Step 20, 64 records",
    ):
        assert words in page.text


def test_what_the_user_named_is_escaped(tmp_path: Path) -> None:
    attack = "<script>alert(1)</script><img src=x onerror=alert(2)>$\\frac{"
    config = make_config(
        tmp_path, model={"checkpoint": attack}, reward={"name": attack}, data={"train": f"{attack}.jsonl"}
    )
    run = write_run(config, steps=2)
    row = {"step": 2, f"val/{attack.replace('/', '')}/mean@4": 0.5}
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    log = RunLog(config, writer=True, resume_step=2)
    log.warn("wide band", f"an earlier one {attack}")
    log.warn("wide band", f"c is too wide {attack}")
    response = "<script>alert(1)</script></pre>{{ 7 * 7 }}"
    both = [*answers(0, ("p", f"{response}\ud83d", 0.0)), *answers(2, ("p", "fine", 1.0))]
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in both))
    page = read_page(write_report(run))
    assert page.loads_nothing
    assert f"{response}?" in page.text and "reward 0 → 1" in page.text
    assert f"c is too wide {attack}" in page.text and "an earlier one" not in page.text
    assert f"{attack}, float32" in page.text
    assert table(run / "report" / "index.html")["Evaluation"][1] == "0.500"
    (run / "config.toml").write_text((run / "config.toml").read_text().replace('"known"', '"<script>"'))
    with pytest.raises(InputError, match=r"run\.name = '<script>'"):
        write_report(run)


def test_runs_that_ended_early(tmp_path: Path) -> None:
    run = write_run(make_config(tmp_path / "one"), steps=1)
    path = write_report(run)
    assert read_page(path).pictures == EVERY
    rows = table(path)
    assert rows["Reward"][:2] == ("0.010", "0.010") and rows["Steps"][1] == "1 of 20"
    assert "Evaluation" not in rows
    assert path.read_bytes() == write_report(run).read_bytes(), "the same run gives the same page"

    path = write_report(write_run(make_config(tmp_path), steps=0, evaluations={0: 0.25}))
    assert read_page(path).pictures == {"Reward"}
    rows = table(path)
    assert rows["Evaluation"][:2] == ("0.250", "0.250") and rows["Reward"][:2] == ("–", "–")


def test_a_loss_without_a_band_on_s(tmp_path: Path) -> None:
    page = read_page(write_report(write_run(make_config(tmp_path, loss={"name": "dapo"}), steps=6)))
    assert page.pictures == EVERY
    assert "at the end c" not in page.text and "shares of tokens" in page.text


def test_runs_without_clips_or_kept_sequences(tmp_path: Path) -> None:
    config = make_config(tmp_path, batch={"mini_batches": 1})
    path = write_report(write_run(config, steps=6, off_policy=False))
    fewer = {"Exponent of S", "Noise σ̂ and width c", "KL to the rollout policy"}
    assert read_page(path).pictures == LEARNING | HEALTH - fewer
    assert not {"Clip rate", "LRE (mean)", "LRE pooled"} & table(path).keys()

    path = write_report(write_run(make_config(tmp_path / "none", log={"sequences": 0}), steps=6))
    assert read_page(path).pictures == LEARNING | RATES | HEALTH
    assert "LRE pooled" not in table(path)


def test_null_in_the_files(tmp_path: Path) -> None:
    run = write_run(make_config(tmp_path), steps=12, extra={"actor/entropy": math.nan})
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["actor/entropy"] is None
    for name in ("critic/rewards/mean", "fspo/lre_mean", "actor/grad_norm", "response_length/max"):
        rows[10][name] = None
    rows[11] |= {"fspo/c_low": None, "fspo/sigma_hat": None}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = write_report(run)
    assert read_page(path).pictures == EVERY - {"Entropy"}
    assert table(path)["Reward"][1] == "0.098"  # mean of .08, .09, .10 and .12
    assert "nan" not in read_page(path).text.lower()


def test_records_that_count_in_no_rate_are_left_out(tmp_path: Path) -> None:
    row = {"step": 1, "length": [5, 0, 7], "log_ratio_sum": [None, 0.0, 0.25], "advantage": [1.0, 1.0, -1.0]}
    row |= {"update": [2, 2, 3], "prompt": [0, 0, 1]}
    row |= {"clipped": [0, 0, 1], "out_of_band": [False, False, True], "ratio": [None, 1.0, 0.0]}
    (tmp_path / "sequences.jsonl").write_text(json.dumps(row) + "\n")
    records = read_records(tmp_path)
    assert (records.length.tolist(), records.log_ratio_sum.tolist()) == ([7], [0.25])
    assert records.clipped.tolist() == records.out_of_band.tolist() == [True]


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    run = write_run(make_config(tmp_path, run={"steps": 50}), steps=50, count=900)
    path = write_report(run)
    assert "40,000 records, evenly over all steps" in table(path)["LRE pooled"][2]
    assert path.stat().st_size < 1_500_000
    cloud = read_page(path).figures["S against √L"]["layer"][0]["data"]["values"]
    assert len(cloud) == 900 and {name for row in cloud for name in row} == {"line", "x", "y", "kind"}


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError, match=r"holds no metrics\.jsonl"):
            write_report(folder)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "val')  # killed while it wrote its first row
    with pytest.raises(InputError, match="holds no step"):
        write_report(tmp_path)
    assert not (tmp_path / "report").exists()


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


def test_machines_are_told_once() -> None:
    assert machines([]) == {}
    same = machines([job(0), job(3)])
    assert same["Hardware"] == "2 processes on Model X, 8 cores on the first machine"
    assert same["Versions"] == "Python 3.12, torch 2.9"
    moved = machines([job(0), job(3, processes=1, device="GPU Y")])
    assert "; from step 4: 1 process × GPU Y; Model X" in moved["Hardware"]
    assert moved["Versions"] == same["Versions"]


def test_a_job_records_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module.dist, "get_world_size", lambda: 2)
    assert cpu_name("processor\t: 0\nmodel name\t: Some CPU \nmodel name\t: another\n") == "Some CPU"
    assert cpu_name("model name :\n") != ""
    found = machine(backend := choose_backend("cpu", "local"))
    assert backend.use() == {
        "perf/cpu_memory": pytest.approx(psutil.Process().memory_info().rss / 2**30, rel=0.1)
    }
    assert found["processes"] == 2 and found["device"] == "CPU" and found["cpu"]
    assert {"Python", "torch", "megatron-fspo"} <= found["versions"].keys()
    config = make_config(tmp_path)
    config.run_folder.mkdir(parents=True)
    for step in (None, 3, 1):
        RunLog(config, writer=True, resume_step=step).job(step or 0, found)
    rows = list(read_rows(config.run_folder / "jobs.jsonl"))
    assert [row["step"] for row in rows] == [0, 1], "those after the step that the job goes on from are gone"
    assert machines(rows)["Versions"].startswith("Python 3.")


def answers(step: int, *given: tuple[str, str, float]) -> list[dict[str, Any]]:
    rows = ({"prompt": p, "response": r, "answer": "a", "reward": reward} for p, r, reward in given)
    return [{"step": step, **row} for row in rows]


def write_samples(folder: Path, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(rows)


def test_responses_that_changed_come_first(tmp_path: Path) -> None:
    first = answers(0, ("p", "a", 0.0), ("q", "b", 1.0), ("r", "c", 1.0), ("p", "d", 0.0), ("gone", "", 0.0))
    middle = answers(2, ("p", "?", 1.0))
    last = answers(4, ("p", "A", 0.0), ("q", "B", 1.0), ("r", "C", 0.0), ("p", "D", 1.0))
    write_samples(tmp_path, *first, *middle, *last)
    found = browsed(tmp_path, [])
    shown = [(one.prompt, [(row["step"], row["parts"][0][1]) for row in one.responses]) for one in found]
    assert shown == [
        ("r", [(0, "c"), (4, "C")]),
        ("p", [(0, "d"), (4, "D")]),
        ("q", [(0, "b"), (4, "B")]),
        ("p", [(0, "a"), (2, "?"), (4, "A")]),
    ]
    assert [one.change for one in found] == [-1, 1, 0, 0]
    for few in ([], first, [*first, *answers(4, ("new", "", 0.0))]):
        write_samples(tmp_path, *few)
        assert browsed(tmp_path, []) == []


def test_many_evaluations_are_thinned_and_keep_both_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [(f"p{number}", "text", 0.0) for number in range(50)]
    rows = write_samples(tmp_path, *(row for step in range(40) for row in answers(step, *prompts)))
    found = browsed(tmp_path, [])
    steps = [row["step"] for row in found[0].responses]
    assert len(found) == 20 and len(steps) == 12 and (steps[0], steps[-1]) == (0, 39)
    monkeypatch.setattr("megatron_fspo.lab.report.samples._WHOLE", 10)
    found = browsed(tmp_path, [*rows[:50], *rows[-50:]])
    assert [row["step"] for row in found[0].responses] == [0, 39]


def test_a_trajectory_is_shown_in_its_parts(tmp_path: Path) -> None:
    folder = write_run(make_config(tmp_path), steps=4, turns=[1, 2, 3, 4] * 16)
    parts = [["wrote", "I ask <b>"], ["inserted", "a tool"], ["context", "a summary"], ["wrote", "done"]]
    rows = [{**answers(step, ("p", "text", 0.0))[0], "parts": parts} for step in (0, 4)]
    write_samples(folder, *rows)
    page = write_report(folder).read_text(encoding="utf-8")
    assert page.count('class="inserted" title') == page.count('class="context" title') == 2
    assert "I ask &lt;b&gt;" in page and "Clip rate by turns" in page and "Turns" in page
    assert {"data-step": "4", "data-end": None} in [attrs for _, attrs in Page(page).tags]
    write_samples(folder, *({**row, "parts": [["wrote", "x" * 9000]] * 90} for row in rows))
    (pair,) = browsed(folder, [])
    last = pair.responses[-1]["parts"]
    assert len(last) == 60 and sum(len(text) for _, text in last) < 10_000


def test_long_texts_keep_both_ends() -> None:
    assert shortened("short", 30) == "short"
    assert shortened("a" * 1000 + "b" * 1020, 30) == f"{'a' * 20} [… 1,990 characters …] {'b' * 10}"
    assert shortened("\ud83d", 30) == "?"


def test_the_exponent_has_an_interval_or_a_reason(tmp_path: Path) -> None:
    found = exponent_by_step(read_records(write_run(make_config(tmp_path), steps=20)))
    assert not isinstance(found, str)
    low, high = found.interval
    assert low < found.value < high and low < 0.5 < high, "S is a random walk there"
    alike = records_from([5] * 8, [False] * 8, [False] * 8, [1.0] * 8, sums=[0.1] * 8)
    assert exponent_by_step(alike) == "1 independent groups of sequences; an interval needs at least 3"


def test_routers_have_pictures(tmp_path: Path) -> None:
    names = ("router/load_max", "router/load_max/mean", "router/entropy", "actor/route_flips")
    routers = dict.fromkeys(names, 1.25) | {"rollout/route_flips": math.nan}
    run = write_run(make_config(tmp_path), steps=6, extra=routers)
    lines = [{"step": 5, "load": [[1, 1]]}, {"step": 6, "load": [[2, 6, 4, 0], [9, 9, 9, 9], [0, 0, 0, 0]]}]
    (run / "routers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = read_page(write_report(run))
    own = {"Load of the experts", "Busiest expert", "Entropy of the routers", "Flipped routes"}
    assert page.pictures == EVERY | own and page.loads_nothing
    cells = {
        (row["y"], row["x"]): row["value"] for row in page.figures["Load of the experts"]["data"]["values"]
    }
    assert cells[0, 0] == pytest.approx(2 / 3, rel=1e-4) and [cells[0, x] for x in (1, 3)] == [2, 0]
    assert [cells[1, x] for x in range(4)] == [1] * 4 and [cells[2, x] for x in range(4)] == [0] * 4


def test_long_lines_are_means_of_stretches_and_settings_keep_their_levels() -> None:
    values = np.array([0.03] * 2000 + [0.05] * 2000)
    series = Series(steps=np.arange(1, 4001), values=values)
    style = {"label": "c", "colour": charts.ORANGE}
    held = list(charts.Line.over_steps(series, kind=charts.HELD, **style).rows())
    assert len(held) == 300 and {row["y"] for row in held} == {0.03, 0.05} and held[-1]["x"] == 4000
    values[1000] = 9.0
    spiked = list(charts.Line.over_steps(series, **style).rows())
    assert max(row["y"] for row in spiked) < 1 and max(row["high"] for row in spiked) == 9.0
    ends = Series(steps=series.steps, values=values - 1), Series(steps=series.steps[:-1], values=values[1:])
    assert charts.Line.over_steps(series, *ends, **style).low is None, "not every value has an interval"


def test_a_figure_is_drawn_without_a_browser() -> None:
    series = Series(steps=np.arange(1, 31), values=np.linspace(0.0, 1.0, 30))
    lines = [charts.Line.over_steps(series, series, series, label="a <b>", colour=charts.BLUE)]
    svg = charts.as_svg(charts.chart(lines, charts.STEP, charts.axis("reward")))
    assert svg.startswith("<svg") and "a &lt;b&gt;" in svg and "<b>" not in svg and "http://www.w3.org" in svg


def rows_of(page: Page, title: str) -> dict[str, list[dict[str, Any]]]:
    """Label → rows of its line."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in page.figures[title]["data"]["values"]:
        lines.setdefault(row.pop("line"), []).append(row)
    return lines
