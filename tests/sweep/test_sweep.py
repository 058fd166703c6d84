"""A sweep without its runs: its file, limits at a matched clip rate, and figures from known folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dumps import write
from launch import REPO
from megatron_fspo.config import Config
from megatron_fspo.config.loading import load_config, make_config
from megatron_fspo.errors import InputError, TrainingError
from megatron_fspo.lab.report.history import History, Records, steady
from megatron_fspo.lab.report.samples import AccuracyChange, accuracy_change, first_and_last_samples
from megatron_fspo.lab.sweep.file import Sweep, make_run_config, planned, read_sweep
from megatron_fspo.lab.sweep.processes import make, matched_loss
from megatron_fspo.lab.sweep.summary import summarize, table
from report_runs import records_from

RUN = REPO / "examples/make_sum/run.toml"


def sweep_of(tmp_path: Path, text: str) -> Sweep:
    file = tmp_path / "sweep.toml"
    file.write_text(f'config = ["{RUN}"]\nfolder = "{tmp_path}/runs"\n{text}', encoding="utf-8")
    return read_sweep(file)


ARMS = """
seeds = [3, 1]
match = "rloo"
[keys.loss]
c_low = 0.02
[keys.run]
steps = 4
[arms.fspo.loss]
c_high = 0.04
[arms.rloo.loss]
name = "rloo"
eps_high = 0.1
"""


def test_every_seed_has_every_arm_and_the_one_to_match_comes_first(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, ARMS)
    runs = list(planned(sweep))
    assert [run.name for run in runs] == ["rloo-3", "fspo-3", "rloo-1", "fspo-1"]
    fspo, _ = make_run_config(sweep, runs[1])
    assert (fspo.run.name, fspo.run.seed, fspo.run.steps) == ("fspo-3", 3, 4)
    assert fspo.run_folder == tmp_path / "runs/fspo-3"
    assert (fspo.loss.name, fspo.loss.c_low, fspo.loss.c_high) == ("fspo", 0.02, 0.04)
    # A loss of another name begins from its own defaults.
    rloo, files = make_run_config(sweep, runs[0])
    assert (rloo.loss.name, rloo.loss.eps_low, rloo.loss.eps_high) == ("rloo", 0.2, 0.1)
    assert [file.name for file in files] == ["run.toml", "rloo-3.toml"]
    with_words = sweep.model_copy(update={"words": ("--run.steps", "9")})
    assert make_run_config(with_words, runs[0])[0].run.steps == 9
    with pytest.raises(InputError, match=r"nowhere\.toml: No such file"):
        read_sweep(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[arms]", r"sweep\.toml: arms is missing"),
        ("seeds = [1, 1]\n[arms.a]", "seeds: each once"),
        ("seed = 1\n[arms.a]", "unknown key seed; did you mean seeds"),
        ('match = "b"\n[arms.a]\n[arms.c]', "match = b: arms has a, c"),
        ('match = "a"\nunmatched = ["b"]\n[arms.a]', "match = b: arms has a"),
        ('[arms."../a"]', r"arms\.\.\./a"),
        ("jobs = 0\n[arms.a]", "jobs = 0: .*greater than 0"),
        ("[arms.a.run]\nseed = 2", r"a: run\.seed is the sweep's to set"),
        ("[keys.run]\nname = 'x'\n[arms.a]", r"keys: run\.name is the sweep's to set"),
        ("[arms.a", r"sweep\.toml: "),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        sweep_of(tmp_path, text)
    assert "\n" not in str(error.value)


def walks(count: int = 4000) -> Records:
    """S ~ Normal(0, σ²L); a seventh was clipped, whatever the band was."""
    random = np.random.default_rng(0)
    lengths = random.integers(4, 101, count)
    clipped = np.arange(count) % 7 == 0
    sums = random.normal(size=count) * 0.02 * np.sqrt(lengths)
    signs = np.where(np.arange(count) % 3 == 0, -1.0, 1.0)
    records = records_from(lengths, clipped, clipped, signs, sums)
    return replace(records, step=np.arange(count) * 10 // count + 1)


def config_with(**loss: Any) -> Config:
    tree = load_config(RUN).model_dump()
    return make_config({**tree, "loss": loss}, source="test")


@pytest.mark.parametrize(
    "keys",
    [
        {"name": "fspo", "c_low": 0.03, "c_high": 0.06, "calibrate": 14},
        {"name": "fspo", "exponent": 0.8},
        {"name": "fspo", "exponent": "measured", "calibrate": 14},
        {"name": "rloo"},
        {"name": "gspo", "eps_high": 0.001},
    ],
)
def test_as_large_a_share_is_really_clipped(keys: dict[str, Any]) -> None:
    records, before = walks(), config_with(**keys)
    found = matched_loss(before, records)
    assert found["name"] == keys["name"] and not found.get("calibrate")
    band = config_with(**found).loss.band()
    assert band is not None
    low, high = band.bounds(torch.from_numpy(records.length).double())
    low, high, s, a = low.numpy(), high.numpy(), records.log_ratio_sum, records.advantage
    clipped = (s < low) & (a < 0) | (s > high) & (a > 0)
    # On the other side of A a record can only be clipped by the dual clip, which is not counted.
    counted = records.clipped & (s * a > 0)
    assert 0.4 < counted.sum() / records.clipped.sum() < 0.6
    assert clipped.mean() == pytest.approx(counted.mean(), abs=3e-4)
    if keys.get("c_high") == 0.06:
        assert found["c_high"] == pytest.approx(2 * found["c_low"])


@pytest.mark.parametrize(("name", "said"), [("ctpo", "no band on S"), ("rloo", "no limits")])
def test_what_cannot_be_matched(name: str, said: str) -> None:
    records = walks()
    far = replace(records, log_ratio_sum=3000 * records.log_ratio_sum)
    with pytest.raises(InputError, match=f"loss.name = {name}.* {said}"):
        matched_loss(config_with(name=name), far)


@pytest.mark.parametrize(("moved", "first"), [(None, 1), (3, 4)])
def test_what_came_before_the_calibration_is_left_out(tmp_path: Path, moved: int | None, first: int) -> None:
    rows = [{"step": n, "fspo/c_high": 0.05 if moved and n >= moved else 0.03} for n in range(1, 11)]
    write(tmp_path / "metrics.jsonl", [{"step": 0, "val/x/mean@4": 0.5}, *rows])
    assert steady(walks(), History(tmp_path)).step.min() == first


def change_of(folder: Path) -> AccuracyChange | None:
    history = History(folder)
    return accuracy_change(history, first_and_last_samples(folder, history))


def write_run(folder: Path, *, outside: Sequence[bool], reward: float) -> None:
    """Two steps of eight sequences, and an evaluation before and after: two prompts, two responses each."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = [
        {"step": n, "critic/rewards/mean": reward * n, "response_length/mean": 10.0, "fspo/c_high": 0.03}
        | {"actor/grad_norm": 1.0, "actor/grad_norm/max": 1.0 + n}
        for n in (1, 2)
    ]
    before, after = ({"step": n, "val/x/mean@2": score} for n, score in ((0, 0.5), (2, 0.75)))
    write(folder / "metrics.jsonl", [before, *steps, after])
    columns: dict[str, list[Any]] = {"length": [5] * 4 + [40] * 4, "out_of_band": [*outside]}
    columns |= {"log_ratio_sum": [0.1] * 8, "advantage": [1.0] * 8, "clipped": [*outside], "ratio": [1.1] * 8}
    columns |= {"update": [2] * 8, "prompt": [*range(8)]}
    write(folder / "sequences.jsonl", [{"step": n, **columns} for n in (1, 2)])
    graded = [(0, "a", 1.0), (0, "a", 0.0), (0, "b", 0.0), (0, "b", 1.0)]
    graded += [(2, "a", 1.0), (2, "a", 1.0), (2, "b", 0.0), (2, "b", 1.0)]
    sample = {"answer": "1", "response": ""}
    rows = [{"step": step, "prompt": prompt, "reward": r, **sample} for step, prompt, r in graded]
    write(folder / "samples.jsonl", rows)


def make_sweep(folder: Path, **more: Any) -> Sweep:
    return Sweep(config=(RUN,), folder=folder, seeds=(1, 2), arms={"even": {}, "uneven": {}}, **more)


def test_arms_are_compared_seed_by_seed(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path / f"even-{seed}", outside=[False, True] * 4, reward=0.1 * seed)
        uneven = [False] * 4 + [True] * (2 + seed) + [False] * (2 - seed)
        write_run(tmp_path / f"uneven-{seed}", outside=uneven, reward=0.1 * seed + 0.05)
    found = summarize(make_sweep(tmp_path, match="even"))
    even, uneven = found["arms"]["even"], found["arms"]["uneven"]
    assert even["out_of_band"]["value"] == 0.5 and uneven["out_of_band"]["value"] == 7 / 16
    assert uneven["lre_mean"]["value"] > even["lre_mean"]["value"]
    assert uneven["lre_signed"] == uneven["lre_within_sign"] == uneven["lre_mean"]
    assert even["accuracy/x"]["value"] == 0.75 and even["grad_norm_spike"]["value"] == 3.0
    assert even["reward_last"]["value"] == pytest.approx(0.225)
    # The seeds differ more than the arms do: paired, the difference is exact.
    gained = found["differences"]["uneven"]["reward_last"]
    assert gained["value"] == pytest.approx(0.075) and gained["half_width"] == pytest.approx(0, abs=1e-12)
    assert (gained["above"], gained["seeds"]) == (2, 2)
    assert "even" not in found["differences"]
    text = table(found, "even")
    assert "| even | 0.500 ± 0.000 |" in text and "uneven less even, LRE of what is clipped" in text


def test_the_change_of_accuracy_has_its_interval_where_all_responses_are_kept(tmp_path: Path) -> None:
    write_run(tmp_path, outside=[False] * 8, reward=0.1)
    found = change_of(tmp_path)
    assert found is not None and found.interval is not None and (found.before, found.after) == (0.5, 0.75)
    low, high = found.interval
    assert low <= 0.25 <= high and low < high
    rows = (tmp_path / "samples.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "samples.jsonl").write_text("".join(rows[:-1]))
    assert change_of(tmp_path) == AccuracyChange(before=0.5, after=0.75, interval=None)


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_exit_status_of_a_run_that_fails_is_named(tmp_path: Path, jobs: int) -> None:
    sweep = sweep_of(tmp_path, f"jobs = {jobs}\nseeds = [1]\n[arms.one]\n")
    with pytest.raises(TrainingError, match=r"1 of 1 runs failed: one-1: exit status 7: see above"):
        make(sweep, lambda line: None, {"one": ("-c", "import sys; sys.exit(7)")})
