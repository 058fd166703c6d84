import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from megatron_fspo.errors import InputError
from megatron_fspo.lab.report.history import pooled_lre, read_records
from megatron_fspo.lab.report.page import write_report
from megatron_fspo.record.log import RunLog
from report_runs import (
    BY_SEQUENCE,
    HEALTH,
    LEARNING,
    RATES,
    make_config,
    on_policy_metrics,
    read_page,
    table,
    write_run,
)


def test_the_page_tells_the_numbers_of_the_run(tmp_path: Path) -> None:
    run = write_run(make_config(tmp_path), steps=20, evaluations={0: 0.25, 10: 0.5, 20: 0.75})
    path = write_report(run)
    assert path == run / "report" / "index.html"

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
    assert rows["LRE pooled"][1] == f"{pool.mean:.3f}"
    low, high = pool.mean_interval
    assert rows["LRE pooled"][2] == (
        f"95% interval {low:.3f} to {high:.3f}; null floor {pool.null_mean:.3f}; "
        "1,280 records, evenly over all steps"
    )

    text = read_page(path).text
    assert "Means over steps 1–5 and steps 16–20" in text
    assert "c = 0.03 (low), 0.04 (high)" in text
    assert "some/model, float32" in text
    assert "tensor = 2, sequence = true" in text
    assert "320 records of steps 16 to 20" in text
    assert "Step 20, 64 records" in text
    assert "is our reconstruction" in text


def test_the_page_has_every_picture_and_loads_nothing(tmp_path: Path) -> None:
    path = write_report(write_run(make_config(tmp_path), steps=20, evaluations={0: 0.5}))
    page = read_page(path)
    assert page.pictures == LEARNING | RATES | BY_SEQUENCE | HEALTH
    assert not {tag for tag, _ in page.tags} & {"script", "iframe", "object", "embed"}
    for _, attributes in page.tags:
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("data:", "#")), attributes
    text = path.read_text(encoding="utf-8")
    assert "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(['\"]?([^)]*)", text))
    assert [item.name for item in path.parent.iterdir()] == ["index.html"]


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
    page = read_page(write_report(run))
    assert not {tag for tag, _ in page.tags} & {"script", "img"}
    assert f"c is too wide {attack}" in page.text and "an earlier one" not in page.text
    assert f"{attack}, float32" in page.text
    assert table(run / "report" / "index.html")["Evaluation"][1] == "0.500"
    (run / "config.toml").write_text((run / "config.toml").read_text().replace('"known"', '"<script>"'))
    with pytest.raises(InputError, match=r"run\.name = '<script>'"):
        write_report(run)


def test_runs_that_ended_early(tmp_path: Path) -> None:
    run = write_run(make_config(tmp_path / "one"), steps=1)
    path = write_report(run)
    page = read_page(path)
    assert page.pictures == LEARNING | RATES | BY_SEQUENCE | HEALTH
    assert "Means over step 1 and step 1" in page.text and "running mean" not in page.text
    rows = table(path)
    assert rows["Reward"][:2] == ("0.010", "0.010") and rows["Steps"][1] == "1 of 20"
    assert "Evaluation" not in rows
    assert path.read_bytes() == write_report(run).read_bytes(), "the same run gives the same page"

    path = write_report(write_run(make_config(tmp_path), steps=0, evaluations={0: 0.25}))
    assert read_page(path).pictures == {"Reward"}
    rows = table(path)
    assert rows["Evaluation"][:2] == ("0.250", "0.250")
    assert rows["Reward"][:2] == ("–", "–")
    assert rows["Steps"][1] == "0 of 20"


@pytest.mark.parametrize("loss", ["rloo", "dapo"])
def test_other_losses(tmp_path: Path, loss: str) -> None:
    page = read_page(write_report(write_run(make_config(tmp_path, loss={"name": loss}), steps=6)))
    assert page.pictures == LEARNING | RATES | BY_SEQUENCE | HEALTH
    assert f"{loss}: advantage" in page.text and "at the end c" not in page.text
    token_level = loss == "dapo"
    assert ("Every token has a band of its own" in page.text) == token_level
    assert ("shares of tokens" in page.text) == token_level


def test_an_on_policy_run_has_nothing_to_clip(tmp_path: Path) -> None:
    config = make_config(tmp_path, batch={"mini_batches": 1})
    path = write_report(write_run(config, steps=6, off_policy=False))
    page = read_page(path)
    assert page.pictures == LEARNING | HEALTH - {
        "Exponent of S",
        "Noise σ̂ and width c",
        "KL to the rollout policy",
    }
    assert "one optimizer step per rollout" in page.text
    assert not {"Clip rate", "LRE (mean)", "LRE pooled"} & table(path).keys()

    # Off policy, but without any kept sequences.
    path = write_report(write_run(make_config(tmp_path / "none", log={"sequences": 0}), steps=6))
    page = read_page(path)
    assert page.pictures == LEARNING | RATES | HEALTH and "log.sequences = 0" in page.text
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
    assert read_page(path).pictures == LEARNING | RATES | BY_SEQUENCE | HEALTH - {"Entropy"}
    assert table(path)["Reward"][1] == "0.098"  # mean of .08, .09, .10 and .12
    assert "nan" not in read_page(path).text.lower()


def test_records_that_count_in_no_rate_are_left_out(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run = write_run(config, steps=1)
    row = {
        "step": 1,
        "length": [5, 0, 7],
        "log_ratio_sum": [None, 0.0, 0.25],
        "advantage": [1.0, 1.0, -1.0],
        "clipped": [False, False, True],
        "out_of_band": [False, False, True],
        "ratio": [None, 1.0, 0.0],
    }
    (run / "sequences.jsonl").write_text(json.dumps(row) + "\n")
    records = read_records(run)
    assert records.length.tolist() == [7]
    assert records.log_ratio_sum.tolist() == [0.25]
    assert records.clipped.tolist() == records.out_of_band.tolist() == [True]


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    steps, each = 300, 1024
    config = make_config(tmp_path, run={"steps": 2000})
    run = write_run(config, steps=0, evaluations={0: 0.5})
    random = np.random.default_rng(0)
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(1, 2001):
            noisy = {name: value * (1 + random.random()) for name, value in on_policy_metrics(step).items()}
            noisy |= {f"fspo/{key}": random.random() for key in ("out_of_band", "clip_low", "clip_high")}
            noisy |= {f"fspo/{key}": random.random() for key in ("lre_mean", "lre_max", "lre_null")}
            noisy |= {"fspo/kl_k3": random.random(), "fspo/sigma_hat": random.random()}
            noisy |= {"fspo/c_low": 0.03, "fspo/c_high": 0.03, "fspo/exponent": 0.5}
            noisy |= {"fspo/drift": 0.0, "fspo/dual_clip_frac": 0.01, "val/held_out/mean@4": random.random()}
            file.write(json.dumps({"step": step, **noisy}) + "\n")
    with (run / "sequences.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            lengths = random.integers(1, 4096, each)
            sums = 0.02 * np.sqrt(lengths) * random.standard_normal(each)
            outside = (np.abs(sums) > 0.03 * np.sqrt(lengths)).tolist()
            columns = {"length": lengths.tolist(), "log_ratio_sum": sums.tolist(), "advantage": [1.0] * each}
            columns |= {"clipped": outside, "out_of_band": outside, "ratio": [1.0] * each}
            file.write(json.dumps({"step": step, **columns}) + "\n")
    path = write_report(run)
    assert read_page(path).pictures == LEARNING | RATES | BY_SEQUENCE | HEALTH
    assert "40,000 records, evenly over all steps" in table(path)["LRE pooled"][2]
    assert path.stat().st_size < 1_000_000
    assert "data:image/png;base64" in path.read_text(encoding="utf-8")  # the scatter is pixels


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no metrics\.jsonl"):
        write_report(tmp_path)
    with pytest.raises(InputError, match=r"holds no metrics\.jsonl"):
        write_report(tmp_path / "nowhere")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "val')  # killed while it wrote its first row
    with pytest.raises(InputError, match="holds no step"):
        write_report(tmp_path)
    assert not (tmp_path / "report").exists()
